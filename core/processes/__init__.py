"""Messages between a child process and its parent: ``child_link`` is the parent's side, ``parent_link`` the child's."""
