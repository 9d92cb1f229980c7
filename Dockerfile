# One image, every role: `docker run waypost worker`, `… relay`, `… receiver`, `… migrate`.
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/waypost
COPY requirements.lock .
RUN pip install --require-hashes -r requirements.lock

COPY contracts contracts
COPY relay relay
COPY receiver receiver
COPY orchestrator orchestrator
COPY migrations migrations
COPY examples examples
COPY LICENSE README.md ./
RUN printf '#!/bin/sh\nexec python -m orchestrator "$@"\n' > /usr/local/bin/waypost \
 && chmod +x /usr/local/bin/waypost \
 && useradd --uid 10001 --create-home waypost \
 && install -d -o waypost /var/lib/waypost
ENV PYTHONPATH=/opt/waypost

USER waypost
WORKDIR /var/lib/waypost
ENTRYPOINT ["waypost"]
CMD ["--help"]
