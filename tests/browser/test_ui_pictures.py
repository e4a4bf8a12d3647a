"""Images of messages in a real browser: those stored as parts, those within a message, and those of elsewhere."""

import base64
import struct
import zlib

from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.conftest import MakeServer
from tests.kit import Json, make_sample


def png(width: int, height: int, row: bytes) -> bytes:
    """A grey image whose rows all are ``row``."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress((b"\0" + row) * height, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def shown(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_of_a_message_are_drawn_and_none_is_loaded_from_elsewhere(tab: Tab, make_server: MakeServer) -> None:
    run = make_server().start_run(group_size=1)
    small, large = png(3, 2, b"\x80" * 3), png(100, 90, bytes(range(100)))  # stored in the message, and as a part
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in (small, large)]
    urls += ["data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>", "https://example.com/a.png"]
    messages = [{"role": "user", "content": [shown(url) for url in urls]}, {"role": "assistant", "content": "seen"}]
    run.send([make_sample(uid="looks", messages=messages)])
    [group] = run.groups()
    body = run.client.get(f"{run.path}/groups/{group['group_id']}/body", params={"uid": "looks"}).text
    assert body.count("forebay-part:") == 1
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}/groups/{group['group_id']}/samples/looks")
    expect(tab.page.locator("img")).to_have_count(2)
    tab.wait_for("[...document.images].every((each) => each.naturalWidth)")
    sizes = "[...document.images].map((each) => [each.naturalWidth, each.naturalHeight])"
    assert tab.page.evaluate(sizes) == [[3, 2], [100, 90]]
    expect(tab.page.get_by_text("Not shown: images of other addresses and types are not loaded.")).to_have_count(2)
    tab.assert_accessible()
    tab.assert_quiet(run.server.url)
