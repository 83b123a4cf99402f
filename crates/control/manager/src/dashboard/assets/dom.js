// Builds elements, and makes what stands there like what should, in place: what has the focus keeps
// it, and a reader of the page is not sent back to its beginning every second.

const SVG = "http://www.w3.org/2000/svg";

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    // The policy forbids style attributes, and allows this.
    if (name === "css") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element. */
export const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);

/** The element of this id. */
export const byId = (id) => document.getElementById(id);

/** Makes the children of `parent` like `wanted`. Those with a `data-key` are known by it. */
export function show(parent, ...wanted) {
  const target = document.createElement("div");
  target.append(...wanted.flat(Infinity).filter(Boolean));
  align(parent, target);
}

function align(have, want) {
  const keyed = new Map();
  for (const child of have.children) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  let at = have.firstChild;
  for (const next of [...want.childNodes]) {
    const key = next.dataset?.key;
    const same = key === undefined ? at : keyed.get(key);
    const fits = same && same.nodeName === next.nodeName && same.dataset?.key === key;
    if (!fits) {
      have.insertBefore(next, at);
      continue;
    }
    // Moving an element takes the focus from it, so it moves only if it must.
    if (same !== at) have.insertBefore(same, at);
    else at = at.nextSibling;
    update(same, next);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function update(have, want) {
  if (have.nodeType !== Node.ELEMENT_NODE) {
    if (have.nodeValue !== want.nodeValue) have.nodeValue = want.nodeValue;
    return;
  }
  for (const { name } of [...have.attributes]) {
    if (name !== "style" && !want.hasAttribute(name)) have.removeAttribute(name);
  }
  for (const { name, value } of want.attributes) {
    if (name !== "style" && have.getAttribute(name) !== value) have.setAttribute(name, value);
  }
  if (have.style.cssText !== want.style.cssText) have.style.cssText = want.style.cssText;
  align(have, want);
}
