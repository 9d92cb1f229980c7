"""Every limit that more than one part knows. A limit that is reached is a named error, never a silent cut.

The names end in `_MAX` or in the unit they count.
"""

from datetime import timedelta
from typing import Final

# JSON
JSON_DEPTH_MAX: Final = 64  # arrays and objects inside each other; PostgreSQL's parser takes thousands
JSON_DIGITS_MAX: Final = 4300  # digits of one integer; Python's own default for text to int
PAYLOAD_BYTES_MAX: Final = 256 * 1024  # one payload of a fact: an input, a result, a request, an outcome

PAYLOAD_STORED_BYTES_MAX: Final = 16 * 1024 * 1024  # one that is by reference, where there is a payload store

# What applications ask for
ERRAND_SIGNALS_MAX: Final = 256  # in one transaction; each locks a key
EVENT_HOPS_MAX: Final = 16  # starts of flows by events of ours, one after the other; the next starts nothing
PUBLISHED_LIFE: Final = timedelta(days=4)  # of a published event, for the endpoints that subscribe to it

# Executions
FACTS_MAX: Final = 25_000  # facts of one journal; then the execution is held
FACTS_WARN: Final = 20_000  # facts of one journal; from then on it is said that it grows long
OPEN_ASKS_MAX: Final = 2_000  # things one execution waits for at once; then it is held
FORK_WIDTH_MAX: Final = 1_000  # branches of one fork; more are a UsageError
ITEMS_MAX: Final = 10_000  # items of one map; more are a UsageError
RESUMES_MAX: Final = 10_000  # times that one input resumes a flow; then it runs without waiting, and is held
CHILDREN_MAX: Final = 1_000  # children of one execution at once; one more is refused
CHILD_DEPTH_MAX: Final = 16  # children inside each other; one deeper is refused
STARTS_MAX: Final = 1_000  # executions that a flow starts at one input; more hold it
UNDOS_MAX: Final = 2_000  # steps one scope would have to undo; then the execution is held
CALL_TIMEOUT: Final = timedelta(days=1)  # for the answer to a command, or to an undo, without timeout=
SPAN_MAX: Final = timedelta(days=3653)  # of a sleep or a timeout: ten years

# Attributes of executions
ATTRIBUTES_MAX: Final = 32  # of one execution; more are a UsageError
ATTRIBUTE_NAME_BYTES_MAX: Final = 64  # of the name of one
ATTRIBUTE_TEXT_BYTES_MAX: Final = 256  # of a text that is the value of one
CONDITIONS_MAX: Final = 8  # about attributes, of one search

# Approvals
DECIDERS_MAX: Final = 100  # names that one approval asks
CHOICES_MAX: Final = 20  # of one approval
REMINDERS_MAX: Final = 100  # of one approval; none follows them

# Identities and keys, in bytes of UTF-8; the tables allow no less, and an index entry holds them all
IDENTITY_BYTES_MAX: Final = 512  # event id, webhook id, event type, idempotency key
SOURCE_BYTES_MAX: Final = 1024  # a CloudEvents source
KEY_BYTES_MAX: Final = 1024  # business key, key of an event (its subject)
NAME_BYTES_MAX: Final = 128  # tenant, endpoint, sender, flow, version, step

# Events on the wire
EVENT_BYTES_MAX: Final = 256 * 1024  # a request to the receiver, as read
MESSAGE_BYTES_MAX: Final = 1024 * 1024  # a stored message of the outbox
ATTRIBUTE_BYTES_MAX: Final = 2048  # any other attribute: time, dataschema, an extension
EXTENSIONS_MAX: Final = 32  # extension attributes of one event
EXTENSION_NAME_CHARACTERS_MAX: Final = 64  # the specification asks for 20 and allows more

# Contracts of events
CONTRACTS_MAX: Final = 200  # that one tenant has registered
SCHEMA_BYTES_MAX: Final = 64 * 1024  # of one of them
SCHEMA_DEPTH_MAX: Final = 64  # of a schema, and of what is checked with it
SCHEMA_STEPS_MAX: Final = 100_000  # schemas that one value is compared with
SCHEMA_PATTERN_CHARACTERS_MAX: Final = 4096  # of a text where a schema has a pattern

# Signatures (Standard Webhooks)
SECRET_BYTES_MIN: Final = 24  # the specification: 24 to 64
SECRET_BYTES_MAX: Final = 64
FOREIGN_SECRET_BYTES_MIN: Final = 16  # of a Standard Webhooks secret that a sender has from elsewhere
SHARED_SECRET_BYTES_MAX: Final = 256  # of a secret, or a token, that another scheme has
SECRETS_MAX: Final = 10  # live secrets of one owner; each costs an HMAC for each message
SIGNATURES_MAX: Final = 5  # candidates that are tried of one header
TIMESTAMP_TOLERANCE_SECONDS: Final = 300  # to either side

# The receiver
RECEIVE_BODY_SECONDS: Final = 5.0  # to read one body; then 408
RECEIVE_HEADER_SECONDS: Final = 10.0  # to read one head, and between two requests of a connection; then cut
RECEIVE_HEADERS_MAX: Final = 64  # header fields of one request
RECEIVE_LINE_BYTES_MAX: Final = 4096  # the request line
RECEIVE_FIELD_BYTES_MAX: Final = 8190  # one header field
RECEIVE_CONCURRENCY_MAX: Final = 512  # requests at work in one process; more get 503
RECEIVE_CONNECTIONS_MAX: Final = 2048  # open connections of one process; more are closed
RECEIVE_BATCH_MAX: Final = (
    100  # events in one transaction; post_mail locks at most 256 keys, an event has two
)
RECEIVE_EVENTS_MAX: Final = 100  # of one request in batched mode: they are one transaction
RECEIVE_WRITERS: Final = 1  # transactions at once in one process
RECEIVE_WAIT_SECONDS: Final = 10.0  # for the durable answer of the database; then 503
RECEIVE_TRIES_MAX: Final = 4  # of one transaction that failed for a passing reason; then 503
RECEIVE_DRAIN_SECONDS: Final = 15.0  # for requests at work when the process is asked to stop
STREAM_POLL_SECONDS: Final = 5.0  # after which a receiver looks for events in line, though nobody told it to
RETRY_AFTER_SECONDS: Final = 1  # what a 503 asks for
SENDERS_FRESH_SECONDS: Final = 2.0  # a sender and its secrets are read again after that
SENDERS_UNKNOWN_SECONDS: Final = 0.5  # the same for a name that nobody has
SENDERS_KEPT_MAX: Final = 4096  # names in memory, known or not

# Data that a message names (`dataref`)
DATA_LIFE: Final = timedelta(days=30)  # of the URL of an event's data; that of a command's ends with its time
DATA_CONCURRENCY_MAX: Final = 8  # answers with data at once in one receiver; more get 503
DATA_SAME_MAX: Final = 2  # of these under one URL; more get 503
DATA_SECONDS: Final = 10.0  # to take an answer with data, beside what its bytes may take; then cut
DATA_BYTES_PER_SECOND: Final = 256 * 1024  # whoever takes less is cut
DATA_CHUNK_BYTES: Final = 64 * 1024  # that are written at once
DATA_FETCH_SECONDS: Final = 8.0  # for the helper to get the data of a command; then 503
DATA_CONNECT_SECONDS: Final = 2.0  # of these, for a connection

# Error texts
SHOWN_CHARACTERS_MAX: Final = 80  # of a value that somebody else wrote
PROBLEMS_MAX: Final = 20  # named in one error
