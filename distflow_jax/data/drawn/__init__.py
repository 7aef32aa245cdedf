"""Tasks whose problems are drawn: shapes, digits, charts."""
