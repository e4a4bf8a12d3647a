"""Full text of what models and tools wrote, for the page's search.

- ``searches``: the indexes of the runs that are searched, each built in the background.
- ``text_index``: one index, a temporary SQLite file.
"""
