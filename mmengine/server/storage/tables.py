"""The SQL statements that create and upgrade the tables of the database."""


def _counted(table: str, size: str) -> tuple[str, ...]:
    """Return a table's triggers, which update the byte sum in `totals` when rows are deleted or changed. No
    trigger runs on inserts, so code that inserts rows must also update the byte sum.
    """
    new, old = size.format(row="NEW"), size.format(row="OLD")
    change = "BEGIN UPDATE totals SET num_bytes = num_bytes {change}; END"
    return (
        f"CREATE TRIGGER {table}_go AFTER DELETE ON {table} {change.format(change=f'- ({old})')}",
        f"CREATE TRIGGER {table}_change AFTER UPDATE ON {table} {change.format(change=f'+ {new} - ({old})')}",
    )


UPGRADE_FROM_1 = (  # Statements that convert the tables of version 1 to version 2.
    "DROP TRIGGER IF EXISTS responses_come",
    "DROP TRIGGER IF EXISTS media_come",
    "ALTER TABLE responses ADD COLUMN key TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX responses_by_key ON responses(key, owner) WHERE key != ''",
)
TABLES = (
    """CREATE TABLE responses(
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, created INTEGER NOT NULL, kept REAL NOT NULL,
        envelope BLOB NOT NULL, answer BLOB)""",
    "CREATE INDEX responses_by_age ON responses(kept) WHERE answer IS NOT NULL",
    "CREATE INDEX responses_unfinished ON responses(id) WHERE answer IS NULL",
    "CREATE TABLE media(sha TEXT PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE TABLE holders(
        response TEXT NOT NULL REFERENCES responses(id) ON DELETE CASCADE,
        sha TEXT NOT NULL REFERENCES media(sha), PRIMARY KEY(response, sha)) WITHOUT ROWID""",
    "CREATE INDEX holders_by_media ON holders(sha)",
    """CREATE TRIGGER medium_goes AFTER DELETE ON holders
        WHEN NOT EXISTS (SELECT 1 FROM holders WHERE sha = OLD.sha)
        BEGIN DELETE FROM media WHERE sha = OLD.sha; END""",
    "CREATE TABLE totals(num_bytes INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0)",
    *_counted("responses", "length({row}.envelope) + coalesce(length({row}.answer), 0)"),
    *_counted("media", "length({row}.data)"),
    *(
        f"CREATE TABLE {table}(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, state BLOB)"
        for table in ("files", "batches")
    ),
    *UPGRADE_FROM_1,
)
