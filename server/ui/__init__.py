"""The web page under ``/ui/``: it shows runs, groups and rollouts in a browser, and changes nothing.

``pages`` serves the files of ``assets/`` as they are: ES modules, without a build step. The page asks the server's own
routes and computes in the browser. Text that models and tools wrote is only ever set as text, and the policy in the
headers lets no script run that is not a file of this folder.

Three routes are the page's own: ``overview`` (what is wrong in the whole server), ``history`` (a run over its batches)
and ``search`` (through the indexes of ``server/search``).

- ``main.mjs``: the frame (header, heading, token, footer with the command), and which page the address names.
- ``routes.mjs``: the table of pages. A page is an object of this form; ``at`` has ``params``, ``filters``, ``signal``::

    {path: "/runs/:run", title(params), load(at, previous), render(data, at), command(params, filters, data),
     every(data), said(data)}

  ``load`` returns the data of the page and is repeated after ``every(data)`` ms; ``render`` returns elements;
  ``said`` returns the text for screen readers; ``command`` also gets null as data. A page with ``charts: true`` is
  served under ``/ui/charts``, to which ``main.mjs`` leads.
- ``h.mjs``: elements as data, and how they are patched into the document without moving scroll, selection or focus.
- ``text.mjs``: makes text of others visible, as ``telemetry/visible_text.py`` does.
- ``api.mjs``: requests, the token, errors; ``live.mjs``: repeats a request while the tab is seen, with back-off.
- ``address.mjs``: the address as a page and its filters, and links that keep the shared filters.
- ``group.mjs`` with ``fate.mjs`` (who decided) and ``prefix_tree.mjs`` (where rollouts part); ``rollout.mjs`` with
  ``token_strip.mjs`` and ``token_colours.mjs``. Both read ``samples.mjs``, ``bodies.mjs`` (stored bytes, side arrays)
  and ``turns.mjs``; ``pictures.mjs`` has the images.
- ``search.mjs``: which samples contain a text.
- ``widgets.mjs``: tables, durations, numbers, links, commands to copy.
"""
