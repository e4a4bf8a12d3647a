"""Put axe-core, of one version, into a file: ``fetch_axe.py FILE``. It is no dependency, and no part of the tree."""

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

URL = "https://registry.npmjs.org/axe-core/-/axe-core-4.14.1.tgz"
SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


def main(file: Path) -> None:
    """Fetch the package, compare its digest with the registry's, and extract the script."""
    with urllib.request.urlopen(URL, timeout=120) as reply:
        package = reply.read()
    digest = base64.b64encode(hashlib.sha512(package).digest()).decode()
    if digest != SHA512:
        sys.exit(f"{URL} is another file: sha512-{digest}")
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script
        file.write_bytes(script.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
