// A picture from the camera; the button is there only where the browser allows one: on this machine, or over HTTPS.

import { toFile } from "/page/pictures.js";

const at = (id) => document.getElementById(id);
let stream = null;

export function offerCamera(take, complain) {
  if (!navigator.mediaDevices?.getUserMedia) return;
  at("use-camera").hidden = false;
  at("use-camera").addEventListener("click", async () => {
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
    } catch (error) {
      complain(new Error(error.name === "NotFoundError" ? "There is no camera." : "This page may not use the camera; allow it in the browser."));
      return;
    }
    at("camera").hidden = false;
    at("video").srcObject = stream;
    at("take").focus();
  });
  at("take").addEventListener("click", async () => {
    const video = at("video");
    if (!video.videoWidth) return; // it has just been switched on
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    canvas.getContext("2d").drawImage(video, 0, 0);
    const time = new Date().toLocaleTimeString("en", { hour12: false });
    take(await toFile(canvas, `camera ${time}.jpg`, "jpeg"));
  });
  at("camera-off").addEventListener("click", () => {
    switchOff();
    at("use-camera").focus();
  });
  addEventListener("pagehide", switchOff);
}

function switchOff() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = at("video").srcObject = null;
  at("camera").hidden = true;
}
