//! A browser without a window, driven as the WebDriver standard says, through Debian's
//! chromedriver.

use crate::harness::{
    process::{Running, missing},
    wait::until,
};
use anyhow::{Context as _, bail, ensure};
use hecaton_testkit::scaled;
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

/// How long the driver may take for one command.
const COMMAND_PATIENCE: Duration = Duration::from_secs(60);

/// How long a page may take to become as it should.
const PAGE_PATIENCE: Duration = Duration::from_secs(60);

/// The name of an element's reference in answers; the standard's own.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Why there can be no browser on this machine.
pub(crate) fn none_here() -> Option<String> {
    missing("chromedriver").or_else(|| missing("chromium"))
}

/// A browser with one page. It ends when this is dropped.
pub(crate) struct Browser {
    http: ureq::Agent,
    session: String,
    /// Ended last: it ends the browser, too.
    _driver: Running,
}

impl Browser {
    /// Opens a page.
    pub(crate) fn open(url: &str) -> anyhow::Result<Self> {
        let mut driver = Running::spawn(
            Command::new("chromedriver")
                .arg("--port=0")
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null()),
        )?;
        let port = port(&mut driver)?;
        let http = ureq::Agent::config_builder()
            .timeout_global(Some(scaled(COMMAND_PATIENCE)))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let mut arguments = vec!["--headless=new", "--disable-gpu", "--window-size=1400,1000"];
        if rustix::process::geteuid().is_root() {
            // Its sandbox refuses root.
            arguments.push("--no-sandbox");
        }
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let base = format!("http://127.0.0.1:{port}/session");
        let made = answer(http.post(&base).send_json(wanted)).context("the browser's start")?;
        let id = made["sessionId"].as_str().context("no session")?;
        let browser = Self { session: format!("{base}/{id}"), http, _driver: driver };
        browser.post("url", json!({ "url": url }))?;
        Ok(browser)
    }

    /// Runs a script in the page and returns its result.
    pub(crate) fn script(&self, script: &str) -> anyhow::Result<Value> {
        self.post("execute/sync", json!({ "script": script, "args": [] }))
    }

    /// Waits until a script in the page returns true.
    pub(crate) fn wait(&self, what: &str, condition: &str) -> anyhow::Result<()> {
        until(&format!("the page shows {what}"), PAGE_PATIENCE, || {
            if self.script(&format!("return {condition}"))? == true {
                return Ok(Ok(()));
            }
            let shown = self.script("return document.body?.innerText ?? ''")?;
            Ok(Err(shown.as_str().unwrap_or_default().to_owned()))
        })
    }

    /// Clicks as a person does: on what is there to be seen.
    pub(crate) fn click(&self, selector: &str) -> anyhow::Result<()> {
        let wish = json!({ "using": "css selector", "value": selector });
        let found = self.post("element", wish).with_context(|| format!("no {selector}"))?;
        let id = found[ELEMENT].as_str().context("no element")?;
        self.post(&format!("element/{id}/click"), json!({}))?;
        Ok(())
    }

    /// Has it show pages as someone wishes who likes this scheme of colours: `light` or `dark`.
    pub(crate) fn prefer_scheme(&self, scheme: &str) -> anyhow::Result<()> {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        let params = json!({ "features": features });
        let wish = json!({ "cmd": "Emulation.setEmulatedMedia", "params": params });
        self.post("goog/cdp/execute", wish).map(drop)
    }

    /// Messages of the page's console, including violations of the page's policy.
    pub(crate) fn console(&self) -> anyhow::Result<Vec<String>> {
        let lines = self.post("se/log", json!({ "type": "browser" }))?;
        let lines = lines.as_array().context("no log")?.iter();
        Ok(lines.map(|line| line["message"].to_string()).collect())
    }

    fn post(&self, command: &str, wish: Value) -> anyhow::Result<Value> {
        answer(self.http.post(format!("{}/{command}", self.session)).send_json(wish))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.http.delete(&self.session).call();
    }
}

fn answer(
    response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
) -> anyhow::Result<Value> {
    let mut response = response?;
    let status = response.status();
    let mut body: Value = response.body_mut().read_json()?;
    ensure!(status.is_success(), "the driver says: {}", body["value"]["message"]);
    Ok(body["value"].take())
}

/// The port that the driver says it listens on.
fn port(driver: &mut Running) -> anyhow::Result<u16> {
    let output = driver.output()?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        if let Some((_, port)) = line.split_once("successfully on port ") {
            return port.trim_end_matches('.').parse().with_context(|| line.clone());
        }
    }
    bail!("chromedriver does not come up")
}
