"""The database's shape: plain numbered SQL, and what applies it. `0001_tables.sql` explains the model."""
