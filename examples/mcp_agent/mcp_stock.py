"""An MCP server over stdio that reports the stock of items."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("stock", log_level="ERROR")
STOCK = {"apples": 12, "pears": 7}


@server.tool()
def in_stock(item: str) -> int:
    """How many of an item are in stock."""
    if item not in STOCK:
        raise ValueError(f"there is no {item!r}; there are {', '.join(STOCK)}")
    return STOCK[item]


if __name__ == "__main__":
    server.run()
