// Contrasts of all that a page shows: [text or mark, element, text, contrast].
Promise.allSettled(document.getAnimations().map((one) => one.finished)).then(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const painted = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const one of colours) {
      canvas.fillStyle = one;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const found = [];
    for (let one = element; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      const isRow = one.tagName === "g";
      found.unshift(isRow ? getComputedStyle(one.firstChild).fill : style.backgroundColor);
    }
    return found;
  };
  const contrast = (colour, element) => {
    const back = behind(element);
    const both = [[...back, colour], back].map((one) => light(painted(one)));
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  const found = [];
  const add = (kind, element, colour) => {
    const name = `${element.tagName}.${element.getAttribute("class")}`;
    found.push([kind, name, element.textContent.slice(0, 40), contrast(colour, element)]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || element.closest("[disabled]")) continue;
    add("text", element, element instanceof SVGElement ? style.fill : style.color);
  }
  for (const one of document.querySelectorAll("main .curve, .edge, .event, .item circle")) {
    add("mark", one, getComputedStyle(one).stroke);
  }
  for (const one of document.querySelectorAll("input[name], select, button")) {
    add("mark", one.parentElement, getComputedStyle(one).borderColor);
  }
  return found;
})
