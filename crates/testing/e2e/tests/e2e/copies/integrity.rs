//! Pages that are damaged between a donor and a program, by a proxy before the donor.
//!
//! The program's node has a manager of its own, which is told of one donor only: one of the shared
//! cluster's, at the proxy's address.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE, all, eventually, ready_line, until_heartbeats},
    process::{Running, family, missing, name_of},
    wait::until,
};
use anyhow::{Context as _, bail, ensure};
use hecaton_transport::fault::{Chaos, Plan};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::Duration,
};

/// Bytes at the start of a connection that pass unharmed: its greetings.
const GREETINGS_BYTES: u64 = 128;

/// Fills memory, says so, and then checks it from end to end for each line of its input.
pub(crate) const PROGRAM: &str = "
import sys
size = 64 << 20
memory = bytearray(size)
pages = range(0, size, 4096)
for at in pages:
    memory[at:at + 8] = (at * 2654435761 + 1).to_bytes(8, 'little')
print('filled', flush=True)
for line in sys.stdin:
    for at in pages:
        if memory[at:at + 8] != (at * 2654435761 + 1).to_bytes(8, 'little'):
            print('wrong', at, flush=True)
            sys.exit(3)
    print('checked', flush=True)
";

/// Pages that come in at least for one check: 16 MiB of 64 MiB are local, and 8 MiB at most staged.
/// The statistics are late by fewer pages. When they tell of so many more, they tell of pages that
/// came after the damage, which is done to the first bytes of a check.
const CHECKED_PAGES: u64 = (64 - 16 - 8) * 256;

/// A node without donors of its own, and the donor that it was told of.
struct Beside {
    hecaton: PathBuf,
    url: String,
    donor: Value,
    chaos: Chaos,
    // In this order: the donor's node is heard to the end, and a node says farewell to its manager.
    _beats: Beats,
    _node: Running,
    _manager: Running,
}

impl Beside {
    fn start(cluster: &Cluster) -> anyhow::Result<Beside> {
        let status = cluster.status()?;
        let mut donor = status["nodes"][0].clone();
        let first = donor["donors"][0].clone();
        let address: SocketAddr = first["address"].as_str().context("no address")?.parse()?;
        let plan = Plan { spared_bytes: GREETINGS_BYTES, ..Plan::default() };
        let chaos = Chaos::before(address, plan, 1)?;
        donor["name"] = json!("damaged");
        donor["donors"] = json!([first]);
        donor["donors"][0]["address"] = json!(chaos.address().to_string());
        donor["consumers"] = json!([]);

        let spawn = |command: &mut Command| {
            command.env_remove("HECATON_MANAGER").stdin(Stdio::null()).stderr(Stdio::null());
            Running::spawn(command)
        };
        let mut manager = spawn(
            Command::new(&cluster.hecaton)
                .args(["manager", "--json", "--listen", "127.0.0.1:0"])
                .stdout(Stdio::piped()),
        )?;
        let ready = ready_line(&mut manager)?;
        let url = ready["manager"].as_str().context("no URL")?.to_owned();
        let node = spawn(
            Command::new(&cluster.hecaton)
                .args(["node", "--name", "borrower", "--manager", &url, "--dir"])
                .arg(cluster.file("borrower"))
                .stdout(Stdio::null()),
        )?;
        let hecaton = cluster.hecaton.clone();
        let beats = Beats::start(url.clone(), donor.clone());
        let beside =
            Beside { hecaton, url, donor, chaos, _beats: beats, _node: node, _manager: manager };
        eventually(
            || beside.status(),
            "the manager knows the node and its donor",
            PATIENCE,
            |status| {
                let nodes = status["nodes"].as_array().context("no nodes")?;
                Ok(nodes.iter().any(|node| node["name"] == "borrower") && nodes.len() == 2)
            },
        )?;
        until_heartbeats(|| beside.status(), &["borrower"])?;
        Ok(beside)
    }

    /// The manager's status, after one more heartbeat of the donor's node.
    fn status(&self) -> anyhow::Result<Value> {
        beat(&self.url, &self.donor)?;
        let answer = ureq::get(&format!("{}/v1/status", self.url)).call()?;
        Ok(answer.into_body().read_json()?)
    }

    fn on_pool(&self, stats: &Path) -> Command {
        let mut command = Command::new(&self.hecaton);
        command
            .args(["run", "--manager", &self.url, "--local", "16M", "--stats"])
            .arg(stats)
            .args(["--", "python3", "-c", PROGRAM])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command
    }

    /// Pages that came so far, as told a while ago, and those of them that came with a wrong sum.
    fn pages_in(&self) -> anyhow::Result<(u64, u64)> {
        let status = self.status()?;
        let sum = |name: &str| {
            all(&status, "consumers").filter_map(|one| one["stats"][name].as_u64()).sum()
        };
        Ok((sum("pages_in"), sum("checksum_errors")))
    }
}

/// Tells the manager of the donor, as its node would.
fn beat(url: &str, donor: &Value) -> anyhow::Result<()> {
    let url = format!("{url}/v1/nodes/damaged/heartbeat");
    ureq::post(&url).send_json(donor).context("no heartbeat")?;
    Ok(())
}

/// A thread that tells the manager of the donor once a second, until this is dropped: a node that
/// is not heard for some seconds counts as silent.
struct Beats {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    fn start(url: String, donor: Value) -> Self {
        let (end, ends) = mpsc::channel();
        let is_over = move || ends.recv_timeout(Duration::from_secs(1));
        let thread = thread::spawn(move || {
            while is_over() == Err(RecvTimeoutError::Timeout) {
                // A manager that does not take one takes the next.
                let _ = beat(&url, &donor);
            }
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn stats(path: &Path) -> anyhow::Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

pub(crate) fn a_page_damaged_once_is_read_again(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let beside = Beside::start(cluster)?;
    let path = cluster.file("once.json");
    let mut running = Running::spawn(&mut beside.on_pool(&path))?;
    let mut input = running.child_mut().stdin.take().context("no input")?;
    let output = running.output()?;
    let mut lines = BufReader::new(output).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("filled"), "it does not fill its memory");
    // The damage may hit a request or the head of a frame, which costs a connection. Repeat it
    // then, but only after the statistics show that no page was damaged: two damages might meet
    // in one page.
    until("a page is damaged", LONG, || {
        let (before, _) = beside.pages_in()?;
        beside.chaos.corrupt_next_grain();
        writeln!(input)?;
        ensure!(lines.next().transpose()?.as_deref() == Some("checked"), "a page is wrong");
        let damaged = until("the statistics tell of this check", PATIENCE, || {
            let (now, damaged) = beside.pages_in()?;
            let is_told = damaged > 0 || now >= before + CHECKED_PAGES;
            Ok(if is_told { Ok(damaged) } else { Err(format!("{now} pages in, after {before}")) })
        })?;
        Ok(if damaged > 0 { Ok(()) } else { Err("a check without a wrong sum") })
    })?;
    drop(input);
    let status = running.wait(PATIENCE, || Ok(()))?;
    ensure!(status.success(), "the program ended with {status}");
    let stats = stats(&path)?;
    ensure!(stats["pager"]["checksum_errors"].as_u64() > Some(0), "{stats}");
    ensure!(stats["pager"]["error"].is_null(), "{stats}");
    Ok(Outcome::Passed)
}

pub(crate) fn a_page_damaged_twice_ends_the_program(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let beside = Beside::start(cluster)?;
    let path = cluster.file("twice.json");
    let mut running = Running::spawn(&mut beside.on_pool(&path))?;
    let mut input = running.child_mut().stdin.take().context("no input")?;
    let output = running.output()?;
    let mut lines = BufReader::new(output).lines();
    ensure!(lines.next().transpose()?.as_deref() == Some("filled"), "it does not fill its memory");
    let good = Plan { spared_bytes: GREETINGS_BYTES, ..Plan::default() };
    // One bit of each KiB.
    beside.chaos.set_plan(Plan { corrupted: 1_000_000, ..good });
    writeln!(input)?;
    let launcher = running.id();
    let is_program = |id: &u32| name_of(*id).is_some_and(|name| name.starts_with("python"));
    let status = running.wait(LONG, || {
        // After the program has ended, only the return of its extents remains: let it pass.
        if !family(launcher).iter().any(is_program) {
            beside.chaos.set_plan(good);
        }
        Ok(())
    })?;
    ensure!(status.code() == Some(137), "the program ended with {status}");
    match lines.next().transpose()?.as_deref() {
        None => {}
        Some(line) => bail!("after the damage it still said `{line}`"),
    }
    let stats = stats(&path)?;
    let error = stats["pager"]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("wrong checksum, twice"), "it was ended for {stats}");
    Ok(Outcome::Passed)
}
