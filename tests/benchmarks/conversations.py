"""What agents write: turns of a coding agent, with calls of tools, their output, and source code.

``@number@`` stands where a conversation differs from the next one.
"""

import json
from collections.abc import Iterator
from itertools import count

Message = dict[str, object]

SYSTEM = """You are a careful engineer with a shell. Rules:
\t1. Read before you write; quote paths with spaces ("my file.txt", not my file.txt).
\t2. Answer calls of tools as JSON, e.g. {"command": "ls -la \\"$HOME\\""}.
\t3. Finish with the word DONE — nothing else counts as an end.
"""

TASKS = (
    'Bug №@number@: `parse_row("a;\\"b;c\\"")` gives 3 cells, not 2. Fix `reader/rows.py`; keep the tests green.',
    "Fehler @number@: Umlaute gehen beim Speichern verloren (»Größe« wird zu »GrÃ¶ÃŸe«). Bitte die Ursache finden.",
    "问题 @number@:导入含有制表符和反斜杠(\\t、\\\\)的文件时,程序会崩溃。请修复并补充测试。",
    "Задача @number@: после перезапуска счётчик обнуляется. Найдите причину, исправьте и опишите её кратко.",
    "課題@number@:日付が「2024/2/30」のとき、エラーにならず 3 月 1 日として保存されます。直してください。",
    "Le total de la facture n°@number@ est faux dès qu'une remise dépasse 100 € — corrige « totals.ts ».",
)

THOUGHTS = (
    'The quoted cell is cut at the separator inside of it: the state "in quotes" must be lost somewhere.',
    "Ich vermute, dass zweimal dekodiert wird: erst als UTF-8, dann noch einmal als Latin-1. Das prüfe ich zuerst.",
    "先重现问题:写一个包含 `\\t` 和 `\\\\` 的小文件,再运行一次导入程序,看看堆栈信息。",
    "The test fails as expected ✅ — now the fix. I keep the signature, since `export.py` calls it too.",
    "Счётчик хранится в памяти и не читается из файла при старте; нужно вызвать load() до первого increment().",
    "Two of 41 tests fail, both in `test_rows.py`. The second is the same cause; I do not touch its expectation.",
)

PYTHON = '''def parse_row(line: str, separator: str = ";") -> list[str]:
    """Split a line; a separator between quotes is text: 'a;"b;c"' has two cells."""
    cells, cell, is_quoted = [], "", False
    for at, char in enumerate(line.rstrip("\\r\\n")):
        if char == '"' and line[at - 1 : at] != "\\\\":
            is_quoted = not is_quoted
        elif char == separator and not is_quoted:
            cells.append(cell)
            cell = ""
        else:
            cell += char
    return [*cells, cell]  # @number@
'''

C = """static int\tread_escape(const char *s, char *out)
{
\tswitch (*s) {
\tcase 'n':\t*out = '\\n'; return 1;
\tcase 't':\t*out = '\\t'; return 1;
\tcase '"':\t*out = '"';  return 1;
\tcase '\\\\':\t*out = '\\\\'; return 1;
\tdefault:\tfprintf(stderr, "line @number@: unknown escape \\\\%c\\n", *s);
\t\treturn -1;
\t}
}
"""

TYPESCRIPT = """export function total(lines: Line[], rate = 0.19): string {
\tconst net = lines.reduce((sum, {price, count}) => sum + price * count, 0);
\tconst pattern = /^\\s*"(?<name>[^"\\\\]*(?:\\\\.[^"\\\\]*)*)"\\s*$/u;
\treturn `${lines.map(l => l.name.replace(pattern, "$<name>")).join(", ")}: ${(net * (1 + rate)).toFixed(2)} €`;
}
"""

PYTEST = """\x1b[1m============================= test session starts ==============================\x1b[0m
collected 41 items

tests/test_rows.py \x1b[32m.\x1b[0m\x1b[32m.\x1b[0m\x1b[31mF\x1b[0m\x1b[32m.\x1b[0m          [ 9%]

    def test_a_quoted_separator_is_text():
>       assert parse_row('a;"b;c"') == ["a", "b;c"]
\x1b[1m\x1b[31mE       AssertionError: assert ['a', '"b', 'c"'] == ['a', 'b;c']
E         At index 1 diff: '"b' != 'b;c'
E         Left contains one more item: 'c"'\x1b[0m

tests/test_rows.py:@number@: AssertionError
FAILED tests/test_rows.py::test_a_quoted_separator_is_text - 1 failed, 40 passed in 0.41s
"""

LISTING = """total 48
drwxr-xr-x  6 agent agent  4096 Mär  3 09:14 .
-rw-r--r--  1 agent agent   812 Mär  3 09:14 Makefile
-rw-r--r--  1 agent agent 23041 Mär  3 09:12 'notes (älter).md'
drwxr-xr-x  2 agent agent  4096 Mär  3 09:14 reader
drwxr-xr-x  3 agent agent  4096 Mär  3 09:14 资料
"""

DIFF = """--- a/reader/rows.py
+++ b/reader/rows.py
@@ -@number@,7 +@number@,7 @@ def parse_row(line: str, separator: str = ";") -> list[str]:
     for at, char in enumerate(line.rstrip("\\r\\n")):
-        if char == '"':
+        if char == '"' and line[at - 1 : at] != "\\\\":
             is_quoted = not is_quoted
\t# ↑ an escaped quote does not end the cell
"""

RECORDS = json.dumps(
    [
        {"id": "@number@", "name": 'Łukasz "Luke" Ångström', "path": "C:\\data\\in\\@number@.csv", "score": 0.75},
        {"id": "@number@", "name": "王小明", "path": "\\\\server\\资料\\b.csv", "score": None, "reward": 0.5},
    ],
    ensure_ascii=False,
    indent=2,
)

TRACEBACK = """Traceback (most recent call last):
  File "/app/reader/store.py", line @number@, in save
    handle.write(text.encode("latin-1"))
                 ~~~~~~~~~~~^^^^^^^^^^^
UnicodeEncodeError: 'latin-1' codec can't encode character '\\u20ac' in position 17: ordinal not in range(256)
"""

CALLS: tuple[tuple[str, dict[str, str]], ...] = (
    ("shell", {"command": "grep -rn \"parse_row(\" reader/ | sed -e 's/\\t/ /g' | head -n 20"}),
    ("write_file", {"path": "reader/rows.py", "content": PYTHON}),
    ("shell", {"command": "python -m pytest -q tests/test_rows.py 2>&1 | tail -n 30"}),
    ("write_file", {"path": "src/escape.c", "content": C}),
    ("shell", {"command": 'cd "资料" && ls -la && cat "notes (älter).md"'}),
    ("apply_patch", {"patch": DIFF}),
    ("write_file", {"path": "web/totals.ts", "content": TYPESCRIPT}),
)
OUTPUTS = (PYTHON, PYTEST, RECORDS, LISTING, TRACEBACK, C, DIFF, TYPESCRIPT)

LOG_LINES = tuple(
    f'09:14:{at:02} [sandbox @number@] exec "sh" "-c" "cd \\"/app\\" && make\\ttest" → exit {at % 3}, 说明:«готово»\n'
    for at in range(60)
)


def opening(kind: int) -> list[Message]:
    """What a conversation begins with."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASKS[kind % len(TASKS)]}]


def turns(kind: int) -> Iterator[list[Message]]:
    """The agent's words with a call, and what the tool answered, without an end."""
    for turn in count(kind):
        name, arguments = CALLS[turn % len(CALLS)]
        call_id = f"call_@number@_{turn}"
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=bool(turn % 2))}
        yield [
            {
                "role": "assistant",
                "content": THOUGHTS[turn % len(THOUGHTS)],
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": OUTPUTS[turn % len(OUTPUTS)]},
        ]
