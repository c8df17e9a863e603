"use strict";
// Mode "chat": a conversation. Mode "text": each message is completed, or translated, on its own.
const isChat = document.documentElement.dataset.mode === "chat";
const part = (id) => document.getElementById(id);
const [log, error, form, text, send, stop] = ["log", "error", "form", "text", "send", "stop"].map(part);
let messages = [];
let running = null; // the AbortController of the answer that is being received

function element(parent, tag, className, content = "") {
  const made = parent.appendChild(document.createElement(tag));
  made.className = className;
  made.textContent = content; // never as HTML: texts of users and models are untrusted
  return made;
}

function show(role, content) {
  const box = element(log, "div", `message ${role}`);
  box.setAttribute("aria-label", role);
  const paragraph = element(box, "p", "", content);
  box.scrollIntoView({ block: "end" });
  return { box, paragraph };
}

function fail(message) {
  error.textContent = message;
  error.hidden = !message;
}

function busy(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
}

function body(prompt) {
  const values = { stream: true };
  if (isChat) {
    const system = part("system").value.trim();
    values.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  } else {
    values.prompt = prompt;
  }
  for (const [id, name] of [["limit", "max_tokens"], ["temperature", "temperature"]]) {
    if (part(id).value !== "") values[name] = Number(part(id).value);
  }
  return values;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The answer ended early: the connection was lost.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const event of parts) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const values = JSON.parse(data);
      if (values.error) throw new Error(values.error.message);
      yield values;
    }
  }
}

async function request(prompt, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = part("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const options = { method: "POST", headers, body: JSON.stringify(body(prompt)), signal };
  const response = await fetch(path, options).catch((problem) => {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The server does not answer. Check that it is running.");
  });
  if (response.ok) return response;
  const values = await response.json().catch(() => null);
  if (response.status === 401) part("settings").open = true; // where the key is entered
  throw new Error(values?.error?.message ?? `The server answered with status ${response.status}.`);
}

async function answer(prompt) {
  const controller = new AbortController();
  busy(controller);
  fail("");
  const question = show("user", prompt);
  messages.push({ role: "user", content: prompt });
  const reply = show("assistant", "");
  let content = "", reasoning = "", note = "";
  try {
    const response = await request(prompt, controller.signal);
    for await (const values of events(response)) {
      const choice = values.choices[0];
      if (!choice) continue;
      content += (isChat ? choice.delta.content : choice.text) ?? "";
      if (choice.delta?.reasoning_content) {
        reasoning += choice.delta.reasoning_content;
        reply.thought ??= thought(reply.box);
        reply.thought.textContent = reasoning;
      }
      if (choice.finish_reason === "length") note = "Ended at the maximum number of tokens.";
      const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      reply.paragraph.textContent = content;
      if (atEnd) log.scrollTop = log.scrollHeight;
    }
  } catch (problem) {
    if (problem.name === "AbortError") note = "Stopped.";
    else fail(problem.message);
  }
  if (content || note) {
    messages.push({ role: "assistant", content });
    if (note) element(reply.box, "div", "note", note);
  } else if (error.hidden) {
    messages.push({ role: "assistant", content });
    element(reply.box, "div", "note", "An empty answer.");
  } else {
    // Nothing was answered: the message goes back into the field, to send it again.
    messages.pop();
    question.box.remove();
    reply.box.remove();
    if (!text.value) text.value = prompt;
  }
  busy(null);
}

function thought(box) {
  const details = document.createElement("details");
  details.className = "reasoning";
  box.prepend(details);
  element(details, "summary", "", "Reasoning");
  return element(details, "p", "");
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = text.value.trim();
  if (!prompt || running) return;
  text.value = "";
  answer(prompt);
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
stop.addEventListener("click", () => running?.abort());
part("new").addEventListener("click", () => {
  if (running) return;
  messages = [];
  log.replaceChildren();
  fail("");
  text.focus();
});
if (!isChat) {
  document.title = document.querySelector("h1").textContent = "Text";
  part("system").hidden = document.querySelector("label[for=system]").hidden = true;
  part("new").textContent = "Clear";
}
