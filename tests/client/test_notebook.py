"""Batches and runs in a notebook."""

from html.parser import HTMLParser

from forebay.client import BufferClient
from tests.kit import ServerProcess, make_group

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_a_batch_and_a_run_are_tables_in_which_texts_stay_texts(server: ServerProcess) -> None:
    run = server.start_run(group_size=50, name="shown")
    messages = [{"role": "assistant", "content": f"{HOSTILE} and {'<' * 10_000} 42"}]
    rewards = [n / 4 for n in range(50)]
    run.write(*make_group(HOSTILE, rewards, messages=messages, reward_parts={"exact": 0.25}))
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batch = client.read(num_groups=1, wait_s=20, step=7)
        assert batch is not None
        pages = batch._repr_html_(), client.stats()._repr_html_()
    batch_page, run_page = map(Tags, pages)
    assert batch_page.tags | run_page.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert all(len(page) < 256 << 10 and "\x1b" not in page and "\u202e" not in page for page in pages)
    assert "for step 7: 1 group, 50 rows, of which the first 20 are shown" in batch_page.text
    for told in ("<script>alert(1)</script>\\x1b[31m\\u202e/0", " 42\n", "exact 0.25"):
        assert told in batch_page.text
    for told in (run.run_id, "shown", "1 leased", "mean 6.125, min 0, max 12.25"):
        assert told in run_page.text
    run.stop()
