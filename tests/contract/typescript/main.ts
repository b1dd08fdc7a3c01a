// Creates a session, chats in it twice, closes it, and reads its trajectory from the collector.
//
//     node build/main.js GATEWAY COLLECTOR
//
// Prints one JSON object with what it saw.
import { credentials, type ClientReadableStream, type ServiceError } from "@grpc/grpc-js";

import { ChatMessage, Role } from "./gen/rollmesh/v1/chat.js";
import { CollectorServiceClient, ReadSessionsRequest, type ReadSessionsResponse } from "./gen/rollmesh/v1/collector.js";
import {
  ChatRequest, type ChatResponse, CloseSessionRequest, type CloseSessionResponse, CreateSessionRequest,
  type CreateSessionResponse, GatewayServiceClient, StreamChatRequest, type StreamChatResponse,
} from "./gen/rollmesh/v1/gateway.js";
import { GetServerInfoRequest, type GetServerInfoResponse, ServerServiceClient } from "./gen/rollmesh/v1/server.js";
import { SessionOutcome } from "./gen/rollmesh/v1/session.js";

const DEADLINE_MS = 60_000;

type Callback<Answer> = (error: ServiceError | null, answer: Answer) => void;

function unary<Answer>(call: (callback: Callback<Answer>) => void): Promise<Answer> {
  return new Promise((resolve, reject) => call((error, answer) => (error ? reject(error) : resolve(answer))));
}

async function all<Answer>(stream: ClientReadableStream<Answer>): Promise<Answer[]> {
  const answers: Answer[] = [];
  for await (const answer of stream) answers.push(answer as Answer);
  return answers;
}

function user(text: string): ChatMessage {
  return ChatMessage.fromPartial({ role: Role.ROLE_USER, content: [{ part: { $case: "text", text } }] });
}

function textOf(message: ChatMessage | undefined): string {
  return (message?.content ?? []).map(({ part }) => (part?.$case === "text" ? part.text : "")).join("");
}

async function stored(collector: CollectorServiceClient, sessionId: string): Promise<ReadSessionsResponse> {
  const deadline = Date.now() + DEADLINE_MS;
  for (;;) {
    try {
      const [answer] = await all(collector.readSessions(ReadSessionsRequest.fromPartial({ sessionId })));
      return answer;
    } catch (error) {
      // The gateway hands a closed session over soon after the close.
      if (Date.now() > deadline || !String(error).includes("NOT_FOUND")) throw error;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
}

async function main(gatewayAddress: string, collectorAddress: string): Promise<void> {
  const gateway = new GatewayServiceClient(gatewayAddress, credentials.createInsecure());
  const collector = new CollectorServiceClient(collectorAddress, credentials.createInsecure());
  const server = new ServerServiceClient(gatewayAddress, credentials.createInsecure());

  const info = await unary<GetServerInfoResponse>((done) => server.getServerInfo(GetServerInfoRequest.create(), done));
  const session = await unary<CreateSessionResponse>((done) =>
    gateway.createSession(CreateSessionRequest.fromPartial({ requestId: "typescript" }), done),
  );
  const { sessionId, sessionKey } = session;

  const first = user("What is 6 plus 7?");
  const answered = await unary<ChatResponse>((done) =>
    gateway.chat(ChatRequest.fromPartial({ sessionId, sessionKey, messages: [first] }), done),
  );
  const answer = answered.answers[0];

  const messages = [first, answer.message!, user("And now?")];
  const chat = ChatRequest.fromPartial({ sessionId, sessionKey, messages });
  const pieces = await all<StreamChatResponse>(gateway.streamChat(StreamChatRequest.fromPartial({ chat })));
  let streamed = "";
  for (const { event } of pieces) if (event?.$case === "delta") streamed += event.delta.content;

  const closed = await unary<CloseSessionResponse>((done) =>
    gateway.closeSession(
      CloseSessionRequest.fromPartial({
        sessionId, sessionKey, outcome: SessionOutcome.SESSION_OUTCOME_COMPLETED, rewards: { reward: 1 },
      }),
      done,
    ),
  );
  const record = (await stored(collector, sessionId)).session!;
  const trajectory = record.trajectories[0];
  const tokens = trajectory.tokens!;
  const mask = tokens.lossMaskU8;
  console.log(JSON.stringify({
    service: info.service,
    apiRevision: info.apiRevision,
    first: textOf(answer.message),
    streamed,
    closed: closed.trajectoryIds,
    read: record.trajectories.map((one) => one.trajectoryId),
    reward: record.reward,
    turns: trajectory.turns,
    tokens: tokens.tokenIdsU32le.length / 4,
    logprobs: tokens.logprobsF32le.length / 4,
    mask: mask.length,
    trained: mask.reduce((sum, one) => sum + one, 0),
  }));
  for (const client of [gateway, collector, server]) client.close();
}

const [gatewayAddress, collectorAddress] = process.argv.slice(2);
await main(gatewayAddress, collectorAddress);
