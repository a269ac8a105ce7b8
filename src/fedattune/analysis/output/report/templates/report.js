(async () => {
  const DASHES = ["solid", [8, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 4], [2, 6], [10, 2, 2, 2]];
  const SYMBOLS = ["circle", "rect", "triangle", "diamond", "pin", "arrow", "roundRect", "emptyCircle"];
  const ALONE = "local", LEVELS = 254, UNKNOWN = 255, ROWS = 500, PARTNERS = 7, LINKS = 2, LITTLE = 0.01;
  const P = Look.colours;
  const $ = (id) => document.getElementById(id);

  async function unpack(id) {
    const packed = Uint8Array.from(atob($(id).textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  if (!window.DecompressionStream) { $("broken").hidden = false; return; }
  const D = JSON.parse(new TextDecoder().decode(await unpack("data")));
  const W = await unpack("matrices");
  const C = D.clients, M = D.mixing;
  const { label: METRIC, unit: UNIT, word: WORD, samples: HAS_SAMPLES } = D.metric;
  // Percent have two decimals; of other metrics, which may be in any unit, four digits count.
  const number = (v) => (v === null || v === undefined ? "-" : UNIT || v === 0 ? v.toFixed(2) : String(Number(v.toPrecision(4))));
  const titled = (name) => (UNIT ? `${name} ${UNIT}` : name);
  const state = { client: 0, sort: "gain", down: false, shown: ROWS };

  const charts = [];
  function chart(id, renderer) {
    if (!$(id)) return null;
    const one = echarts.init($(id), null, { renderer: renderer || "svg" });
    charts.push(one);
    return one;
  }
  const fit = () => charts.forEach((one) => one.resize());
  new ResizeObserver(fit).observe(document.body);
  // Pictures keep their size when the page is laid out for paper, so they are drawn as wide as paper before.
  const printing = (on) => () => {
    Look.print(on);
    charts.forEach((one) => { one.resize(); one.getZr().flush(); }); // now, for paper does not wait for the next frame
  };
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));

  const style = (name) => {
    const i = D.methods.filter((m) => m !== ALONE).indexOf(name), other = i + Math.floor(i / 8); // no two look alike
    return name === ALONE ? { colour: P.ink, dash: [3, 3], symbol: "emptyCircle" }
      : { colour: P.lines[i % 8], dash: DASHES[other % 8], symbol: SYMBOLS[other % 8] };
  };
  const text = (value) => String(value).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const signed = (value, size) => (value > 0 ? "+" : value < 0 ? "\u2212" : "") + size;
  // As on the terminal, a small gain keeps three digits: a loss of 0.004 is not 0.00.
  const points = (value) => signed(value, UNIT && value && Math.abs(value) < 0.1 ? String(Number(Math.abs(value).toPrecision(3))) : number(Math.abs(value)));
  const samples = (value) => signed(value, String(Number(Math.abs(value).toFixed(1))));
  const bytes = (n) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (n >= 1000 && i < 4) { n /= 1000; i += 1; }
    return `${i && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
  };
  const weight = (w) => (w === null ? "not known" : Math.abs(w) >= 0.1 ? w.toFixed(2) : Number(w.toPrecision(2)).toString());
  const short = (name) => (name.length > 12 ? name.slice(0, 11) + "\u2026" : name);
  const narrow = () => innerWidth < 640;
  const base = () => ({ animation: false, textStyle: { fontFamily: "system-ui, sans-serif", color: P.ink } });
  const axis = () => ({ axisLine: { lineStyle: { color: P.grey } }, axisLabel: { color: P.soft }, nameTextStyle: { color: P.soft }, splitLine: { lineStyle: { color: P.grid } } });
  const tip = () => ({ backgroundColor: P.card, borderColor: P.line, textStyle: { color: P.ink, fontSize: 13 }, confine: true });

  function choose(select, names, chosen, changed) {
    select.innerHTML = names.map((n) => `<option value="${text(n)}">${text(n)}</option>`).join(""); // a value keeps its spaces
    if (chosen !== undefined) select.value = chosen;
    select.addEventListener("change", changed);
  }

  // --- gains ---------------------------------------------------------------------------------------------
  const gainful = D.methods.filter((m) => C.methods[m].gain);
  const first = gainful.includes(D.method) ? D.method : gainful[gainful.length - 1] || D.methods[D.methods.length - 1];
  const gainChart = gainful.length ? chart("gains") : null;
  function drawGains() {
    const gain = C.methods[$("gain-method").value].gain;
    const order = C.ids.map((_, i) => i).filter((i) => gain[i] !== null).sort((a, b) => gain[a] - gain[b]);
    gainChart.setOption({
      ...base(),
      grid: { left: 52, right: 16, top: 30, bottom: order.length > 24 ? 70 : 30 },
      tooltip: { ...tip(), trigger: "axis", formatter: ([p]) => {
        const i = order[p.dataIndex];
        const also = HAS_SAMPLES ? `, ${samples(gain[i] * C.test[i] / 100)} of ${C.test[i]} test samples` : "";
        return `client ${text(C.ids[i])}<br>${points(gain[i])} ${text(WORD)}${also}`;
      } },
      xAxis: { ...axis(), type: "category", data: order.map((i) => C.ids[i]), axisTick: { show: false },
        axisLabel: { color: P.soft, rotate: order.length > 24 ? 90 : 0, formatter: short }, axisLine: { onZero: false } },
      yAxis: { ...axis(), type: "value", name: WORD, nameGap: 12 },
      series: [{ type: "bar", barMaxWidth: 34, data: order.map((i) => ({ value: gain[i],
        itemStyle: { color: gain[i] < 0 ? P.barLoss : P.barGain,
          decal: gain[i] < 0 ? { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: 0.8, color: P.stripe } : { symbol: "none" } } })),
        markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: P.ink, type: "solid" }, data: [{ yAxis: 0 }] } }],
    }, true);
  }
  if (gainChart) {
    choose($("gain-method"), gainful, first, drawGains);
    drawGains();
    gainChart.on("click", (p) => mark(C.ids.indexOf(p.name)));
  } else { $("gains").parentElement.hidden = true; }

  // --- curves --------------------------------------------------------------------------------------------
  const curveChart = chart("curves");
  const curveNumber = (v) => (D.curve.unit ? v.toFixed(2) : String(Number(v.toPrecision(4))));
  if (!D.curves.some(({ seeds }) => seeds.some((s) => s.worst.some((v) => v !== null)))) $("y").parentElement.hidden = true;
  function drawCurves() {
    const x = $("x").value, y = $("y").value;
    const series = [];
    for (const { method, seeds } of D.curves) {
      if (!seeds.length) continue;
      const { colour, dash, symbol } = style(method);
      const n = seeds[0].rounds.length; // all seeds have the same rounds
      const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
      const line = [], low = [], band = [];
      for (let i = 0; i < n; i += 1) {
        const values = seeds.map((s) => s[y][i]), where = mean(seeds.map((s) => s[x][i]));
        const isKnown = !values.includes(null); // else an error was not finite: a gap, not 0
        line.push([where, isKnown ? mean(values) : null]);
        low.push([where, isKnown ? Math.min(...values) : null]);
        band.push([where, isKnown ? Math.max(...values) - Math.min(...values) : null]);
      }
      // The legend takes its mark from the first series of a name.
      series.push({ type: "line", name: method, data: line, symbol, symbolSize: 6, showSymbol: n < 25, itemStyle: { color: colour },
        lineStyle: { color: colour, width: method === D.method ? 3 : 2, type: dash }, emphasis: { disabled: true }, z: 3 });
      if (seeds.length > 1) {
        const hidden = { type: "line", name: method, stack: `band ${method}`, symbol: "none", silent: true, itemStyle: { color: colour }, lineStyle: { opacity: 0 }, tooltip: { show: false } };
        series.push({ ...hidden, data: low }, { ...hidden, data: band, areaStyle: { color: colour, opacity: 0.15 } });
      }
    }
    const format = x === "bytes" ? bytes : x === "seconds" ? (v) => `${Number(v.toPrecision(3))} s` : (v) => String(v);
    curveChart.setOption({
      ...base(),
      legend: { type: "scroll", top: 0, itemWidth: 36, textStyle: { color: P.ink } },
      grid: { left: 52, right: 24, top: 44, bottom: 84 },
      tooltip: { ...tip(), trigger: "axis", formatter: (all) => {
        const lines = all.filter((p) => series[p.seriesIndex].lineStyle.opacity !== 0 && p.value[1] !== null);
        return lines.length ? `${x === "rounds" ? "round " : ""}${format(lines[0].value[0])}<br>` + lines
          .sort((a, b) => (D.curve.higher ? 1 : -1) * (b.value[1] - a.value[1])).map((p) => `${p.marker}${text(p.seriesName)} ${curveNumber(p.value[1])}${D.curve.unit}`).join("<br>") : "";
      } },
      xAxis: { ...axis(), type: "value", name: { rounds: "round", bytes: "bytes up and down", seconds: "seconds" }[x], nameLocation: "middle", nameGap: 26,
        axisLabel: { color: P.soft, formatter: format, hideOverlap: true }, splitLine: { show: false }, min: "dataMin", max: "dataMax" },
      yAxis: { ...axis(), type: "value", name: D.curve.unit || D.curve.label, nameGap: 6, scale: true },
      dataZoom: [{ type: "slider", bottom: 8, height: 20, filterMode: "none", labelFormatter: format, borderColor: P.line, textStyle: { color: P.soft } }],
      series,
    }, true);
  }
  $("x").addEventListener("change", drawCurves);
  $("y").addEventListener("change", drawCurves);
  drawCurves();

  // --- clients: distribution and table --------------------------------------------------------------------
  const spreadChart = chart("spread");
  function quantiles(values) {
    const v = values.filter((a) => a !== null).sort((a, b) => a - b);
    const q = (p) => { const k = (v.length - 1) * p, f = Math.floor(k); return v[f] + (v[Math.min(f + 1, v.length - 1)] - v[f]) * (k - f); };
    return v.length ? [v[0], q(0.25), q(0.5), q(0.75), v[v.length - 1]] : [];
  }
  function drawSpread() {
    const groups = [];
    for (const m of D.methods) {
      for (const [point, label] of m === ALONE ? [["judged", "alone"]] : [["judged", "best round"], ["received", "received"], ["trained", "trained"]]) {
        if (C.methods[m][point] && C.methods[m][point].some((a) => a !== null)) groups.push({ m, label, values: C.methods[m][point] });
      }
    }
    $("spread").style.height = `${90 + groups.length * 26}px`;
    const spread = (i) => (((i * 7919) % 101) / 101 - 0.5) * 0.5;
    const dots = groups.flatMap((g, y) => g.values.map((a, i) => (a === null ? null : { value: [a, y + spread(i)], client: i, group: y })).filter((d) => d && d.client !== state.client));
    const marked = groups.map((g, y) => ({ value: [g.values[state.client], y + spread(state.client)], client: state.client, group: y })).filter((d) => d.value[0] !== null);
    const about = (p) => `client ${text(C.ids[p.data.client])}<br>${text(groups[p.data.group].m)}, ${groups[p.data.group].label}: ${number(p.data.value[0])}${UNIT}`;
    // Targets may be in other units at every client: a plain axis would show the largest ones alone.
    const known = groups.flatMap((g) => g.values).filter((a) => a !== null);
    const isLog = D.metric.has_unit && Math.min(...known) > 0 && Math.max(...known) > 50 * Math.min(...known);
    spreadChart.resize();
    spreadChart.setOption({
      ...base(),
      grid: { left: narrow() ? 118 : 170, right: 24, top: 10, bottom: 46 },
      tooltip: { ...tip(), formatter: (p) => (p.seriesType === "scatter" ? about(p) : "") },
      xAxis: { ...axis(), type: isLog ? "log" : "value", scale: true, name: UNIT ? `test ${METRIC}, ${UNIT}` : `test ${METRIC}`, nameLocation: "middle", nameGap: 26 },
      yAxis: [{ ...axis(), type: "category", inverse: true, data: groups.map((g) => `${g.m}, ${g.label}`), axisTick: { show: false }, axisLabel: { color: P.soft, width: narrow() ? 110 : 160, overflow: "truncate" } },
        { type: "value", show: false, min: -0.5, max: groups.length - 0.5, inverse: true }],
      series: [
        { type: "boxplot", data: groups.map((g) => ({ value: quantiles(g.values), itemStyle: { borderColor: style(g.m).colour, color: P.mild } })), silent: true, boxWidth: [8, 16] },
        { type: "scatter", yAxisIndex: 1, data: dots, symbolSize: C.ids.length > 300 ? 3 : 6, itemStyle: { color: P.dot, opacity: 0.5 } },
        { type: "scatter", yAxisIndex: 1, data: marked, symbolSize: 12, symbol: "diamond", itemStyle: { color: P.red } },
      ],
    }, true);
  }
  spreadChart.on("click", (p) => p.data && p.data.client !== undefined && mark(p.data.client));

  function columnsOf(m) {
    const at = C.methods[m];
    const columns = [
      { key: "client", title: "client", value: (i) => C.ids[i], html: (i) => text(C.ids[i]) },
      { key: "train", title: "train", value: (i) => C.train[i] },
      { key: "test", title: "test", value: (i) => C.test[i] },
    ];
    if (C.classes) columns.push({ key: "classes", title: "classes", value: (i) => C.classes[i] });
    const percent = (key, title, values) => columns.push({ key, title, value: (i) => values[i], html: (i) => number(values[i]) });
    if (C.methods[ALONE] && m !== ALONE) percent("alone", titled("alone"), C.methods[ALONE].judged);
    percent("judged", titled("best round"), at.judged);
    if (at.received) percent("received", "received %", at.received);
    if (at.trained) percent("trained", "trained %", at.trained);
    if (at.gain) {
      const tone = (v) => (v < 0 ? "minus" : v > 0 ? "plus" : "");
      columns.push({ key: "gain", title: "gain", value: (i) => at.gain[i], html: (i) => (at.gain[i] === null ? "-" : `<span class="${tone(at.gain[i])}">${points(at.gain[i])}</span>`) });
      if (HAS_SAMPLES) columns.push({ key: "samples", title: "in samples", value: (i) => (at.gain[i] === null ? null : at.gain[i] * C.test[i]), html: (i) => (at.gain[i] === null ? "-" : samples(at.gain[i] * C.test[i] / 100)) });
    }
    if (at.own) {
      percent("own", "own weight %", at.own);
      columns.push({ key: "partners", title: "learns most from", value: (i) => (at.own[i] === null ? null : (at.partners[i][0] || [""])[0]), left: true,
        html: (i) => at.own[i] === null ? "-" : at.partners[i].map(([n, w]) => `${text(n)} (${w.toFixed(1)}%)`).join(", ") || "nobody" });
    }
    return columns;
  }
  function drawTable() {
    const m = $("client-method").value, columns = columnsOf(m), gain = C.methods[m].gain;
    const by = columns.find((c) => c.key === state.sort) || columns[0];
    const only = $("only").value, part = $("filter").value.trim().toLowerCase();
    const keep = C.ids.map((_, i) => i).filter((i) => C.ids[i].toLowerCase().includes(part)
      && (only === "all" || (gain && (only === "lose" ? gain[i] < 0 : gain[i] > 0))));
    const compare = (a, b) => {
      const x = by.value(a), y = by.value(b);
      if (x === null || y === null) return (x === null) - (y === null); // what is not known is last, up or down
      const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return state.down ? -order : order;
    };
    keep.sort((a, b) => compare(a, b) || a - b);
    const shown = keep.slice(0, state.shown);
    $("count").textContent = `${keep.length} of ${C.ids.length} clients` + (shown.length < keep.length ? `, the first ${shown.length} shown` : "");
    const [head, body] = $("clients").children;
    head.innerHTML = "<tr>" + columns.map((c) => `<th scope="col"${c.left ? ' class="text"' : ""} aria-sort="${c.key === by.key ? (state.down ? "descending" : "ascending") : "none"}"><button type="button" data-key="${c.key}">${text(c.title)}${c.key === by.key ? (state.down ? " \u25be" : " \u25b4") : ""}</button></th>`).join("") + "</tr>";
    body.innerHTML = shown.map((i) => `<tr data-client="${i}"${i === state.client ? ' class="marked"' : ""}>` + columns.map((c) => `<td${c.left ? ' class="text"' : ""}>${c.html ? c.html(i) : text(c.value(i))}</td>`).join("") + "</tr>").join("");
  }
  choose($("client-method"), D.methods, first, drawTable);
  $("only").addEventListener("change", drawTable);
  $("filter").addEventListener("input", drawTable);
  $("clients").addEventListener("click", (event) => {
    const key = event.target.closest("button")?.dataset.key, row = event.target.closest("tr[data-client]");
    if (key) {
      state.down = state.sort === key ? !state.down : false;
      state.sort = key;
      drawTable();
    } else if (row) { mark(Number(row.dataset.client)); }
  });

  // --- who learns from whom --------------------------------------------------------------------------------
  let drawMixing = () => {}, drawMarked = () => {};
  if (M.methods) {
    const heat = chart("heat", "canvas"), labels = M.labels ? chart("labels", "canvas") : null;
    const network = chart("network"), evolution = chart("evolution");
    const n = M.clients.length, names = M.names;
    const mixed = Object.keys(M.methods);
    if (!labels) $("label-part").innerHTML = `<h3>Labels</h3><p>${M.target ? `The target is ${text(M.target)}, so there are no shares of classes to compare.` : "Label counts are not in the store: they stay with the clients, or an older version made the run."}</p>`;
    $("hidden").textContent = M.hidden ? `${n} of ${n + M.hidden} clients are shown, evenly from all.` : "";
    const method = () => M.methods[$("mix-method").value];
    const component = () => $("component").selectedIndex;
    const round = () => Number($("round").value);
    const order = () => {
      const how = $("order").value;
      return how === "labels" && M.label_order ? M.label_order : how === "order" ? method().order : names.map((_, i) => i);
    };
    function byte(c, r, i, k) {
      const m = method();
      return W[m.start + ((c * m.rounds.length + r) * n + i) * n + k];
    }
    function value(c, r, i, k) {
      const b = byte(c, r, i, k), { largest, signed } = method().components[c];
      if (b === UNKNOWN) return null;
      if (!signed) return largest * (b / LEVELS) ** 4;
      const s = b / (LEVELS / 2) - 1;
      return largest * Math.sign(s) * s ** 4;
    }
    // One pixel a cell: ECharts' own cells, an object each, take seconds where there are ten thousand.
    function paint(wide, high, scale, signed, cell) {
      const colours = signed ? P.signedTable : P.moreTable;
      const canvas = document.createElement("canvas");
      canvas.width = wide;
      canvas.height = high;
      const context = canvas.getContext("2d"), image = context.createImageData(wide, high);
      for (let y = 0; y < high; y += 1) {
        for (let x = 0; x < wide; x += 1) {
          const v = cell(x, y);
          const share = v === null ? null : Scale.share(scale, v);
          const at = signed ? (1 + Math.sign(v) * share) / 2 : share;
          image.data.set([...(share === null ? P.unknownRgb : colours[Math.round(255 * at)]), 255], 4 * (y * wide + x));
        }
      }
      context.putImageData(image, 0, 0);
      return canvas;
    }
    function enlarged(canvas) { // so far that no browser blurs it when it is stretched
      const large = document.createElement("canvas");
      large.width = canvas.width * Math.ceil(900 / canvas.width);
      large.height = canvas.height * Math.ceil(900 / canvas.height);
      const context = large.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.drawImage(canvas, 0, 0, large.width, large.height);
      return large;
    }
    function heatmap(one, { xs, ys, scale, signed, cell, xname, about }) {
      const image = enlarged(paint(xs.length, ys.length, scale, signed, cell));
      const ticks = { ...axis(), type: "category", axisTick: { show: false }, splitLine: { show: false }, axisLabel: { color: P.soft, fontSize: ys.length > 40 ? 9 : 12, formatter: short } };
      one.about = about;
      one.setOption({
        ...base(),
        grid: { left: 70, right: 12, top: 6, bottom: 74 },
        tooltip: { show: false },
        xAxis: { ...ticks, data: xs, axisLabel: { ...ticks.axisLabel, rotate: xs.some((x) => x.length > 1) ? 90 : 0 }, name: xname, nameLocation: "middle", nameGap: 46 },
        yAxis: { ...ticks, data: ys, inverse: true },
        series: [{ type: "custom", silent: true, data: [0], renderItem: ({ coordSys: { x, y, width, height } }) => ({ type: "image", style: { image, x, y, width, height } }) }],
      }, true);
    }
    function legend(id, { end, largest }, signed, said) { // the colours from left to right, and the weights where they change
      const colours = signed ? P.signed.slice(3) : P.more;
      const marks = end === largest ? `<span style="grid-column: 1 / -1"><em>0</em><em>${said(largest)}</em></span>`
        : `<span><em>0</em><em>${said(end)}</em></span><span><em>${said(largest)}</em></span><small>broken scale: three quarters of the colours end at ${said(end)}, as few weights are above</small>`;
      $(id).innerHTML = `<i style="background: linear-gradient(90deg, ${colours.join(", ")})"></i>${marks}${signed ? "<small>the other colours: as much below 0</small>" : ""}`;
    }
    function reader(one, output) {
      one.getZr().on("mousemove", (event) => {
        const at = [event.offsetX, event.offsetY];
        if (one.about && one.containPixel({ gridIndex: 0 }, at)) $(output).textContent = one.about(...one.convertFromPixel({ gridIndex: 0 }, at));
      });
    }
    reader(heat, "heat-said");
    if (labels) reader(labels, "labels-said");

    const scaleOf = (c, r) => Scale.make(names.flatMap((_, i) => names.map((__, k) => (i === k ? NaN : value(c, r, i, k) ?? NaN))), n);
    const cellOf = (c, r, sorted) => (x, y) => (x === y && !$("own").checked ? null : value(c, r, sorted[y], sorted[x]));
    function drawHeat() {
      const c = component(), r = round(), sorted = order(), { signed } = method().components[c];
      const titles = sorted.map((i) => names[i]), scale = scaleOf(c, r);
      heatmap(heat, { xs: titles, ys: titles, scale, signed, cell: cellOf(c, r, sorted), xname: "from",
        about: (x, y) => `client ${titles[y]} was given ${weight(value(c, r, sorted[y], sorted[x]))} of client ${titles[x]}` });
      legend("heat-scale", scale, signed, weight);
    }
    const FULL = { end: 100, largest: 100 };
    function drawLabels() {
      if (!labels) return;
      const sorted = order(), sums = M.labels.map((row) => row.reduce((a, b) => a + b, 0) || 1);
      heatmap(labels, { xs: M.classes, ys: sorted.map((i) => names[i]), scale: FULL, cell: (x, y) => 100 * M.labels[sorted[y]][x] / sums[sorted[y]], xname: "class",
        about: (x, y) => `client ${names[sorted[y]]}, class ${M.classes[x]}: ${M.labels[sorted[y]][x]} samples, ${percent(M.labels[sorted[y]][x] / sums[sorted[y]])} of its own` });
      legend("labels-scale", FULL, false, (share) => `${share}% of its samples`);
    }
    function drawThumbs() {
      const m = method(), r = round(), sorted = order();
      $("thumbs").hidden = m.components.length < 2;
      $("thumbs").replaceChildren(...m.components.map((one, c) => {
        const button = document.createElement("button");
        button.type = "button";
        button.dataset.component = c;
        button.setAttribute("aria-pressed", String(c === component()));
        const share = m.agreement[one.name]?.share ?? null, said = document.createElement("small");
        if (share !== null) said.textContent = `${percent(share)} from the alike`;
        button.append(paint(n, n, scaleOf(c, r), one.signed, cellOf(c, r, sorted)), one.name, said);
        return button;
      }));
    }
    function drawNetwork() {
      const c = component(), r = round(), m = method(), links = [];
      const sorted = m.order, of = (i) => (m.clusters[i] ? P.lines[(m.clusters[i] - 1) % 8] : P.grey);
      const sizes = M.clients.map((i) => (i < 0 ? 0 : C.train[i])), largest = Math.max(...sizes);
      sorted.forEach((i) => {
        const row = sorted.filter((k) => k !== i).map((k) => [k, value(c, r, i, k)]).filter(([, w]) => w > 1e-4).sort((a, b) => b[1] - a[1]);
        row.slice(0, LINKS).forEach(([k, w]) => links.push({ source: names[k], target: names[i], value: w, colour: of(k) }));
      });
      const strongest = Math.max(...links.map((l) => l.value), 1e-9);
      const marked = names[M.clients.indexOf(state.client)];
      network.setOption({
        ...base(),
        tooltip: { ...tip(), formatter: (p) => (p.dataType === "edge" ? `client ${text(p.data.target)} was given ${weight(p.data.value)}<br>of client ${text(p.data.source)}` : `client ${text(p.name)}, ${p.data.cluster ? `cluster ${p.data.cluster}` : "in no cluster"}<br>${p.data.train} training samples`) },
        series: [{ type: "graph", layout: "circular", circular: { rotateLabel: true }, ...(narrow() ? { left: 50, right: 50, top: 50, bottom: 50 } : { left: 80, right: 80, top: 80, bottom: 80 }),
          label: { show: n <= 60, position: "right", color: P.ink, formatter: (p) => short(p.name) },
          edgeSymbol: ["none", "arrow"], edgeSymbolSize: 6,
          data: sorted.map((i) => ({ name: names[i], cluster: m.clusters[i], train: sizes[i], symbolSize: (n > 60 ? 3 : 9) + (n > 60 ? 5 : 9) * Math.sqrt(sizes[i] / largest),
            itemStyle: { color: of(i), borderColor: names[i] === marked ? P.red : P.page, borderWidth: names[i] === marked ? 4 : 1 } })),
          links: links.map((l) => ({ ...l, lineStyle: { width: 0.5 + (n > 60 ? 1.5 : 4) * l.value / strongest, curveness: 0.25, opacity: l.target === marked || l.source === marked ? 0.95 : 0.4, color: l.target === marked ? P.red : l.colour } })),
          emphasis: { focus: "adjacency" } }],
      }, true);
    }
    function drawEvolution() {
      const i = M.clients.indexOf(state.client), c = component(), m = method();
      if (i < 0) { evolution.clear(); return; }
      const rows = m.rounds.map((_, r) => names.map((_, k) => value(c, r, i, k)));
      const total = names.map((_, k) => rows.reduce((sum, row) => sum + Math.abs(row[k] ?? 0), 0));
      const top = names.map((_, k) => k).filter((k) => k !== i && total[k] > 1e-6).sort((a, b) => total[b] - total[a]).slice(0, PARTNERS);
      const parts = [["own", [i], P.dot], ...top.map((k, j) => [`client ${names[k]}`, [k], P.lines[j % 8]]),
        ["all others", names.map((_, k) => k).filter((k) => k !== i && !top.includes(k)), P.rest]];
      evolution.setOption({
        ...base(),
        aria: { enabled: true, decal: { show: true } },
        legend: { type: "scroll", top: 0, textStyle: { color: P.ink } },
        grid: { left: 52, right: 24, top: 56, bottom: 48 },
        tooltip: { ...tip(), trigger: "axis", formatter: (all) => `round ${all[0].axisValue}<br>` + all.filter((p) => p.value !== null).map((p) => `${p.marker}${text(p.seriesName)} ${p.value.toFixed(1)}%`).join("<br>") },
        xAxis: { ...axis(), type: "category", data: m.rounds, name: "round", nameLocation: "middle", nameGap: 26, boundaryGap: false },
        yAxis: { ...axis(), type: "value", name: "%", max: m.components[c].signed ? null : 100 },
        series: parts.map(([name, members, colour]) => ({ type: "line", name, stack: "all", symbol: "none", lineStyle: { width: 1, color: colour }, itemStyle: { color: colour }, areaStyle: { color: colour, opacity: 0.85 },
          data: rows.map((row) => (row.every((w) => w === null) ? null : 100 * members.reduce((sum, k) => sum + (row[k] ?? 0), 0))) })),
      }, true);
    }
    // Shares close to 0% or 100% must not be read as none or all.
    const percent = (w) => `${(100 * w).toFixed(w > 0.99 && w < 1 || w < 0.01 && w > 0 ? 2 : 0)}%`;
    function say() {
      const m = method(), name = m.components[component()].name, a = m.agreement[name];
      $("round-said").textContent = `round ${m.rounds[round()]}` + (m.rounds.length < m.all_rounds ? ` (${m.rounds.length} of ${m.all_rounds} stored rounds are shown)` : "");
      const kept = `At the end, a client's own weight was ${percent(m.own[name])} on average. `;
      const share = !a ? "" : a.share === null ? "Too little came from others, or from too few, to say whether from the alike. " : `${percent(a.share)} of what came from others came from the quarter whose labels are most like theirs; ${percent(a.chance)} would be chance. `;
      const rank = !a || a.correlation === null ? "" : `Rank correlation of weights and label similarity: ${a.correlation.toFixed(2)}.`;
      $("agreement").textContent = `${name}: ${kept}${share}${rank}`;
    }
    drawMixing = () => { drawHeat(); drawLabels(); drawThumbs(); drawNetwork(); drawEvolution(); say(); };
    drawMarked = () => { if (M.clients.includes(state.client)) $("client").value = C.ids[state.client]; drawNetwork(); drawEvolution(); };
    const turned = () => { drawHeat(); drawThumbs(); drawNetwork(); say(); };
    function picked() {
      const m = method();
      $("component").innerHTML = m.components.map((c) => `<option>${text(c.name)}</option>`).join("");
      $("round").max = m.rounds.length - 1;
      $("round").value = m.rounds.length - 1;
      // First the component in which clients choose most, whomever they choose: one with alike rows shows nothing, and
      // neither does one in which hardly anything comes from others.
      const choosing = m.components.map((one, c) => {
        const weights = names.flatMap((_, i) => names.map((__, k) => (i === k ? 0 : Math.abs(value(c, round(), i, k) ?? 0))));
        const sum = weights.reduce((total, w) => total + w, 0);
        const chosen = sum ? Math.max(...weights) / sum : 0;
        return chosen + (sum / n >= LITTLE ? 2 : 0) + (one.name.endsWith("bias") ? 0 : 4);
      });
      $("component").selectedIndex = choosing.indexOf(Math.max(...choosing));
      drawMixing();
    }
    if (!M.label_order) $("order").querySelector("[value=labels]").remove();
    choose($("mix-method"), mixed, mixed.includes(D.method) ? D.method : mixed[0], picked);
    $("component").addEventListener("change", drawMixing);
    $("order").addEventListener("change", drawMixing);
    $("own").addEventListener("change", () => { drawHeat(); drawThumbs(); });
    $("round").addEventListener("input", turned);
    $("thumbs").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) { $("component").selectedIndex = Number(button.dataset.component); drawMixing(); }
    });
    choose($("client"), names.filter((_, k) => M.clients[k] >= 0), names[0], () => mark(C.ids.indexOf($("client").value)));
    network.on("click", (p) => p.dataType === "node" && mark(C.ids.indexOf(p.name)));
    let playing = null;
    $("play").addEventListener("click", () => {
      const stop = () => { clearInterval(playing); playing = null; $("play").innerHTML = "&#9654;"; };
      if (playing) { stop(); return; }
      if (round() === Number($("round").max)) $("round").value = 0;
      $("play").innerHTML = "&#10073;&#10073;";
      playing = setInterval(() => {
        if (round() === Number($("round").max)) { stop(); return; }
        $("round").value = round() + 1;
        turned();
      }, 400);
    });
    picked();
  }

  // --- communication ---------------------------------------------------------------------------------------
  const trafficChart = chart("traffic");
  function drawTraffic() {
    const t = D.traffic[$("traffic-method").value];
    const parts = t.parts.length ? t.parts : ["all"], up = t.parts.length ? t.up : [t.total[0]], down = t.parts.length ? t.down : [t.total[1]];
    $("traffic").style.height = `${(narrow() ? 154 : 120) + parts.length * 34}px`;
    trafficChart.resize();
    trafficChart.setOption({
      ...base(),
      aria: { enabled: true, decal: { show: true } },
      legend: { top: 0, textStyle: { color: P.ink }, formatter: (name) => `${name}: ${bytes(t.total[name === "up" ? 0 : 1])} in ${t.rounds} rounds` },
      grid: { left: narrow() ? 96 : 150, right: 70, top: narrow() ? 70 : 36, bottom: 34 },
      tooltip: { ...tip(), trigger: "axis", formatter: (all) => `${text(all[0].name)}<br>` + all.map((p) => `${p.marker}${p.seriesName} ${bytes(p.value)}`).join("<br>") },
      xAxis: { ...axis(), type: "value", axisLabel: { color: P.soft, formatter: bytes, hideOverlap: true } },
      yAxis: { ...axis(), type: "category", inverse: true, data: parts, axisTick: { show: false }, axisLabel: { color: P.soft, width: narrow() ? 90 : 140, overflow: "truncate" } },
      series: [["up", up, P.lines[0]], ["down", down, P.lines[1]]].map(([name, data, color]) => ({ type: "bar", name, data, barMaxWidth: 14, itemStyle: { color }, label: { show: true, position: "right", color: P.soft, formatter: (p) => bytes(p.value) } })),
    }, true);
  }
  choose($("traffic-method"), D.methods, first, drawTraffic);
  drawTraffic();

  function mark(client) {
    if (client < 0) return;
    state.client = client;
    drawSpread();
    drawTable();
    drawMarked();
  }
  const gained = C.methods[first].gain, from = M.methods ? M.clients.filter((i) => i >= 0) : C.ids.map((_, i) => i);
  mark(gained ? from.reduce((worst, i) => ((gained[i] ?? 0) < (gained[worst] ?? 0) ? i : worst), from[0]) : from[0]);
  Look.onChange(() => { if (gainChart) drawGains(); drawCurves(); drawSpread(); drawMixing(); drawTraffic(); });
  document.body.dataset.ready = "yes";
})();
