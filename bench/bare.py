"""A bare aiohttp handler: it reads the body, keeps nothing, and says 202. What the receiver is measured beside.

    python -m bench.bare

It runs as the receiver does: uvloop, and a garbage collector that looks less often.
"""

from __future__ import annotations

from aiohttp import web

from orchestrator import bootstrap

ANSWER = b'{"answer":"mail"}'


async def take(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=202, body=ANSWER, content_type="application/json")


async def serve() -> None:
    app = web.Application()
    app.router.add_post("/events/{tenant}/{sender}", take)
    runner = web.AppRunner(app, access_log=None)
    bootstrap.collect_less()
    async with bootstrap.stopping() as stop:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"listens on {runner.addresses[0][1]}", flush=True)
        await stop.wait()
        await runner.cleanup()


if __name__ == "__main__":
    bootstrap.run(serve())
