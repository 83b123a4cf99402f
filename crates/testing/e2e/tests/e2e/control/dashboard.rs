//! Tests the administrator's view and actions in a browser, and `hecaton top` in a terminal.

use crate::{
    harness::{
        Outcome, TestResult,
        browser::{self, Browser},
        cluster::{Cluster, PATIENCE, all},
        process::{Running, family, kill_dead, missing, name_of, signal},
        wait::until,
    },
    life::program_of,
};
use anyhow::{Context as _, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use std::{
    io::{Read, Write as _},
    process::{Command, Stdio},
    sync::mpsc::{Receiver, TryRecvError, channel},
    thread,
};

/// Script with a function `row`: the text of a donor's row in the donors' table.
const fn donor_row() -> &'static str {
    "const row = name => document.querySelector(`#donors tr[data-key=\"${name}\"]`)?.innerText ?? '';"
}

/// The page shows a running program, a killed donor and a draining donor. The drain begins when it
/// is confirmed and not before.
pub(crate) fn in_a_browser() -> TestResult {
    if let Some(reason) = browser::none_here() {
        return Ok(Outcome::Skipped(reason));
    }
    let cluster = Cluster::start(3, "256M")?;
    let mut command = cluster.on_pool("24M", env!("CARGO_BIN_EXE_verify-threads"));
    command.args(["3", "6000", "1000000"]).stdout(Stdio::null()).stderr(Stdio::null());
    let running = Running::spawn(&mut command)?;
    program_of(&running)?;

    let page = Browser::open(&cluster.url)?;
    page.wait("the host", "document.querySelectorAll('#hosts .host .part.lent').length === 1")?;
    page.wait("the program", "document.querySelectorAll('#consumers tbody tr').length === 1")?;
    page.wait("the donors", "document.querySelectorAll('#donors tbody tr').length === 3")?;
    page.wait("who has its memory", "document.querySelectorAll('#flows .ribbon').length > 0")?;
    page.wait(
        "faults a second",
        "/\\d/.test(document.querySelector('#summary [data-key=faults] dd').innerText)",
    )?;
    page.wait(
        "that all is well",
        "document.querySelector('#alarm-list').innerText.includes('Nothing needs attention')",
    )?;

    kill_dead(process_of(&cluster, "donor-2")?);
    page.wait(
        "that a donor was lost",
        "[...document.querySelectorAll('#alarm-list li.warning')]\
         .some(one => one.innerText.includes('donor-2') && one.innerText.includes('was lost'))",
    )?;

    let drains = |status: &Value| {
        let donor = all(status, "donors").find(|donor| donor["name"] == "donor-1");
        Ok(donor.is_some_and(|donor| donor["stats"]["draining"] == true))
    };
    page.click("[data-act=drain][data-donor=donor-1]")?;
    page.wait("the question", "document.querySelector('#confirm').open")?;
    page.click("#confirm-no")?;
    page.wait("no question", "!document.querySelector('#confirm').open")?;
    ensure!(!drains(&cluster.status()?)?, "it drains without having been confirmed");
    page.click("[data-act=drain][data-donor=donor-1]")?;
    page.click("#confirm-yes")?;
    cluster.eventually("donor-1 drains", PATIENCE, drains)?;
    let shown = |what: &str, condition: &str| {
        page.wait(what, &format!("(() => {{ {} return {condition} }})()", donor_row()))
    };
    shown("that it drains", "row('donor-1').includes('draining')")?;
    page.wait(
        "that it is drained",
        "document.querySelector('#alarm-list').innerText.includes('donor is drained')",
    )?;
    page.click("[data-act=undrain][data-donor=donor-1]")?;
    page.click("#confirm-yes")?;
    shown("that it serves again", "row('donor-1').includes('serving')")?;

    page.click("[data-act=recall][data-donor=donor-3]")?;
    page.click("#confirm-yes")?;
    page.wait(
        "that nothing is no size",
        "document.querySelector('#confirm-error').innerText.includes('is no size')",
    )?;

    page.click("#confirm-no")?;
    page.wait("no policy", "document.querySelector('#policy').innerText.includes('none')")?;
    page.click("#policy [data-act=policy]")?;
    page.click("#confirm-choices input[value=anticipating]")?;
    page.click("#confirm-yes")?;
    page.wait(
        "the policy",
        "document.querySelector('#policy code')?.innerText === 'anticipating'",
    )?;
    page.wait(
        "the program's target",
        "document.querySelector('#consumers tbody .meter') !== null",
    )?;
    page.wait(
        "the host's quota",
        "document.querySelector('#hosts .host').innerText.includes('may use')",
    )?;

    let mut grounds = Vec::new();
    for scheme in ["light", "dark"] {
        page.prefer_scheme(scheme)?;
        let faint = page.script(FAINT_TEXT)?;
        ensure!(faint["seen"].as_u64() > Some(50), "where is the text? {faint}");
        ensure!(
            faint["faint"] == serde_json::json!([]),
            "hard to read when it is {scheme}: {faint}"
        );
        grounds.push(faint["ground"].as_u64().context("no ground")?);
    }
    ensure!(grounds[0] > 200 && grounds[1] < 50, "light and dark are {grounds:?} of 255");

    let console = page.console()?;
    ensure!(console.is_empty(), "the console says: {console:?}");
    Ok(Outcome::Passed)
}

/// Finds text with less contrast than the 4.5 to 1 of the Web Content Accessibility Guidelines 2.1
/// (1.4.3). Also returns the number of texts, and the lightness of the page's ground (0 to 255).
const FAINT_TEXT: &str = r#"
const rgba = text => { const n = text.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const light = colour => {
  const [r, g, b] = colour.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = element => {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] === 1) return colour;
  }
  return [255, 255, 255, 1];
};
let seen = 0;
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
  if (!text || element.closest('svg, script, style, noscript, :disabled') || !element.checkVisibility()) continue;
  seen += 1;
  const [a, b] = [rgba(getComputedStyle(element).color), behind(element)].map(light).sort((a, b) => b - a);
  const contrast = (a + .05) / (b + .05);
  if (contrast < 4.5) faint.push(`${text} (${contrast.toFixed(1)})`);
}
return { seen, faint, ground: rgba(getComputedStyle(document.documentElement).backgroundColor)[0] };
"#;

fn process_of(cluster: &Cluster, donor: &str) -> anyhow::Result<u32> {
    let status = cluster.status()?;
    let known = all(&status, "donors").find(|one| one["name"] == donor);
    let pid = known.and_then(|one| one["pid"].as_u64());
    Ok(u32::try_from(pid.with_context(|| format!("no process of {donor}: {status}"))?)?)
}

/// `hecaton top` shows the cluster. It restores the terminal when a key or a signal ends it.
pub(crate) fn in_a_terminal(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("script") {
        return Ok(Outcome::Skipped(reason));
    }
    for by_key in [true, false] {
        let top = format!(
            "stty rows 30 cols 110; exec {} top --manager {}",
            cluster.hecaton.display(),
            cluster.url
        );
        let mut terminal = Running::spawn(
            Command::new("script")
                .args(["-qfec", &top, "/dev/null"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null()),
        )?;
        let mut keys = terminal.child_mut().stdin.take().context("no input")?;
        let output = read_on(terminal.output()?);
        let mut said = String::new();
        read_until(&output, &mut said, "HOSTS")?;
        ensure!(said.contains("\x1b[?1049h"), "it has no screen of its own: {said:?}");
        match by_key {
            true => keys.write_all(b"q")?,
            false => {
                let mut all = family(terminal.id()).into_iter();
                let is_top = |id: &u32| name_of(*id).as_deref() == Some("hecaton");
                signal(all.find(is_top).context("no `hecaton top`")?, Signal::INT);
            }
        }
        read_until(&output, &mut said, "\x1b[?1049l")?;
        let ended = terminal.wait(PATIENCE, || Ok(()))?;
        ensure!(ended.success(), "it ended with {ended}");
    }
    Ok(Outcome::Passed)
}

/// Reads in a thread of its own, so that the wait for missing output can time out.
fn read_on(mut from: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (tell, said) = channel();
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if tell.send(bytes[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    said
}

fn read_until(from: &Receiver<Vec<u8>>, said: &mut String, what: &str) -> anyhow::Result<()> {
    until(&format!("the terminal shows {what:?}"), PATIENCE, || {
        while !said.contains(what) {
            match from.try_recv() {
                Ok(bytes) => said.push_str(&String::from_utf8_lossy(&bytes)),
                Err(TryRecvError::Empty) => return Ok(Err(format!("{said:?}"))),
                Err(TryRecvError::Disconnected) => bail!("it has ended and has shown {said:?}"),
            }
        }
        Ok(Ok(()))
    })
}
