// Elements and formatted numbers, for all pages.

export function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function percent(share) {
  const value = share * 100;
  if (value > 0 && value < 0.01) return "<\u00a00.01\u00a0%";
  return `${value.toFixed(value < 1 ? 2 : 1)}\u00a0%`;
}

export function shortNumber(number) {
  for (const [factor, letter] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (number >= factor) return `${Number((number / factor).toPrecision(3))}${letter}`;
  }
  return `${number}`;
}
