"""A report (``analysis/report.py``) as a page with pictures, or as Markdown.

``selection.py`` says which steps and requests are shown one by one, ``sections.py`` in which order everything is, as
the ``blocks.py`` that both faces share. ``tails.py`` and ``steps.py`` make its longer parts, what became of requests
and one step after the other, ``side_by_side.py`` those of compared runs, and ``charts.py`` the pictures, as plain data.
``page.py`` writes one HTML file with ``assets/``, ``markdown.py`` the same without pictures.
"""
