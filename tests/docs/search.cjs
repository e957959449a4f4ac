// Ask the search of the site: its own worker, with the index that it ships.
// Reads {worker, index, queries} as JSON and writes the locations of the results of each query, best first.
const fs = require("node:fs");
const vm = require("node:vm");

const { worker, index, queries } = JSON.parse(fs.readFileSync(0, "utf8"));
const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3];
const found = {};
let listener;
const ask = (message) => listener({ data: message });
const scope = {
  console,
  addEventListener: (_, handle) => (listener = handle),
  postMessage: ({ type, data }) => {
    if (type === RESULT) found[queries[Object.keys(found).length]] = data.items.map((group) => group[0].location);
    const next = queries[Object.keys(found).length];
    if (next === undefined) console.log(JSON.stringify(found));
    else ask({ type: QUERY, data: next });
  },
};
scope.self = scope;
vm.runInNewContext(fs.readFileSync(worker, "utf8"), scope);
ask({ type: SETUP, data: { ...JSON.parse(fs.readFileSync(index, "utf8")), options: { suggest: true } } });
