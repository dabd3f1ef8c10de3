"""Files of every kind: tables, their cells, and results that are whole or absent."""
