"""Count lines and modules of Python by top folder: ``make count``. All but tests, docs and examples is product."""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_PRODUCT = ("tests", "docs", "examples")


def main() -> None:
    """Print a row for each top folder, and the sum of the product."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines, modules = Counter[str](), Counter[str]()
    for name in listed.stdout.splitlines():
        folder = name.partition("/")[0]
        lines[folder] += len((ROOT / name).read_bytes().splitlines())
        modules[folder] += 1
    product = sorted(lines.keys() - set(NOT_PRODUCT))
    for folder in (*product, *NOT_PRODUCT):
        print(f"{folder:<12}{lines[folder]:>8,} lines{modules[folder]:>6,} modules")
    total, number = sum(lines[folder] for folder in product), sum(modules[folder] for folder in product)
    print(f"{'product':<12}{total:>8,} lines{number:>6,} modules")


if __name__ == "__main__":
    main()
