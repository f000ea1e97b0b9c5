"""Result files: schema, reader, names, tables, goals. Imports nf4 and machine alone."""
