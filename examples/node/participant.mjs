// The shop's bank once more, in Node with two public packages: npm install cloudevents standardwebhooks
import { createServer } from "node:http";
import { text } from "node:stream/consumers";
import { CloudEvent, HTTP } from "cloudevents";
import { Webhook } from "standardwebhooks";

const commands = new Webhook(process.env.PAYMENTS_COMMAND_SECRET);
const replies = new Webhook(process.env.PAYMENTS_REPLY_SECRET);

// What is here ends with the process. A real service keeps it in its database, in the transaction that acts.
const answered = new Map(); // the reply to each command, by its id
const results = new Map(); // what was done, by idempotency key
const done = new Set(); // ids of commands that were done
const undone = new Set(); // ids of commands that must not be done any more

const actions = new Map([
  ["payment.charge", ({ data }) =>
    data.card === "4000000000000002"
      ? ["refused", { code: "declined", message: "the bank says no to this card" }]
      : ["done", { charge: `charge-${data.order}` }]],
  ["payment.refund", ({ undoes }) => ["done", { refunded: done.has(undoes) }]],
]);

function act(command) {
  const { id, type, idempotencykey: key, undoes, expirytime } = command;
  if (results.has(key)) return ["done", results.get(key)];
  if (undoes) undone.add(undoes); // from now on, whether it was done or has not even come
  if (undone.has(id)) return ["refused", { code: "undone" }];
  if (Date.parse(expirytime) <= Date.now()) return ["refused", { code: "expired" }];
  const [outcome, data] = actions.get(type)(command);
  if (outcome === "done") results.set(key, data) && done.add(id);
  return [outcome, data];
}

function replyTo({ id, type, correlationid, traceparent }, [outcome, data]) {
  const names = { type: `${type}.${outcome}`, source: "/bank", causationid: id, correlationid };
  return new CloudEvent({ ...names, traceparent, datacontenttype: "application/json", data });
}

async function take(headers, body) {
  try { commands.verify(body, headers); } catch { return 401; }
  const command = HTTP.toEvent({ headers, body });
  if (!actions.has(command.type)) return 501;
  if (!answered.has(command.id)) answered.set(command.id, replyTo(command, act(command)));
  const reply = answered.get(command.id), message = HTTP.structured(reply), now = new Date();
  const signed = { "webhook-id": reply.id, "webhook-timestamp": String(Math.floor(now / 1000)) };
  signed["webhook-signature"] = replies.sign(reply.id, now, message.body);
  const request = { method: "POST", body: message.body, headers: { ...message.headers, ...signed } };
  const limits = { redirect: "error", signal: AbortSignal.timeout(5000) };
  return (await fetch(command.replyto, { ...request, ...limits })).status === 202 ? 202 : 503;
}

createServer(async (request, response) => {
  const status = text(request).then((body) => take(request.headers, body));
  response.writeHead(await status.catch(() => 503)).end(); // 503: not taken, it comes again
}).listen(Number(process.env.PORT ?? 8091), "127.0.0.1", function () {
  console.log(`payments listens on http://127.0.0.1:${this.address().port}/waypost`);
});
