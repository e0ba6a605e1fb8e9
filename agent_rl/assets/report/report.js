"use strict";

{
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = document.getElementById("charts");
  heading(document.querySelector("h1"), data.runs, data.colours);
  summary(document.getElementById("summary"), data.runs, data.colours);
  drawTables(document.getElementById("tables"), data.tables);
  place(charts, data.charts); // before the viewer scrolls to where its address says
  const some = data.samples.filter((sample) => sample.episodes.length);
  navigation(document.querySelector("nav"), data.charts, some.length ? ["Tables", "Episode viewer"] : ["Tables"]);
  if (some.length) new EpisodeViewer(document.getElementById("viewer"), some);
  else document.getElementById("episode-viewer").hidden = true;
  redraw = () => drawAll(charts, data.charts); // called once plotly, the largest part of the file, has been read
}
