// The step before anything is done.

import { byId, h, show } from "./dom.js";

let act = null;

/** Shows what will be done; `then` does it, with the size that was written or the key that was chosen, if one is asked for. */
export function ask({ title, text, yes, size, choices }, then) {
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  byId("confirm-input").hidden = !size;
  byId("confirm-size").value = "";
  byId("confirm-choices").hidden = !choices;
  show(byId("confirm-choices"), (choices ?? []).map(choice));
  byId("confirm-error").textContent = "";
  act = then;
  byId("confirm").showModal();
  // What changes something does not have the focus from the start.
  byId(size ? "confirm-size" : "confirm-no").focus();
}

const choice = ({ key, text, chosen }) =>
  h("label", { "data-key": key }, h("input", { type: "radio", name: "choice", value: key, checked: chosen }), h("b", {}, key), h("span", {}, text));

const answer = () => document.querySelector("#confirm-choices :checked")?.value ?? byId("confirm-size").value.trim();

byId("confirm-no").addEventListener("click", () => byId("confirm").close());

byId("confirm").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = byId("confirm-yes");
  button.disabled = true;
  try {
    await act(answer());
    byId("confirm").close();
  } catch (error) {
    byId("confirm-error").textContent = error.message;
  }
  button.disabled = false;
});
