//! A manager that is killed at each of its steps while it grants memory.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, LONG, PATIENCE, all, eventually, log_in, scratch},
        process::{Running, kill_dead, missing_any},
        wait::{until, until_every},
    },
    managers::free,
    policy::{start_manager, state_dir},
};
use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PAGE: u64 = 4096;

/// Bytes that each node lends. The first node runs the program, and lends less than the program
/// needs from its start.
const LENDS: [u64; 2] = [64 << 20, 200 << 20];

/// Pages that both nodes lend.
const POOL_PAGES: u64 = (LENDS[0] + LENDS[1]) / PAGE;

/// About as much as the program grows by at a time.
const REQUEST_PAGES: u64 = 1000;

/// Pages that are granted before the first kill. A manager that forgot them could not grant as many
/// again before the test checks the grants. The program would hold more.
const GRANTED_PAGES: u64 = 6 * REQUEST_PAGES;

/// A manager that has started anew listens to quotas for so long, in milliseconds, and a round and
/// the heartbeats that tell of it.
const LISTENED_MS: u64 = 6200;

/// For so long after the program has grown the manager is to be killed. Its node asks within a
/// second, and within the next one it is answered, and so is the other.
const GRANTING: Duration = Duration::from_millis(2500);

/// System calls by which the manager writes, and the counts at which it is killed. The count of
/// each system call starts with the order. The counts grow until a run ends without a kill.
///
/// - `pwrite64`, `fdatasync`: each step of the commit that an order waits for;
/// - `writev`: the answer to the order, then the answers to heartbeats. A grant consists of two
///   such answers, in either order: one to the node that asks, one to the node that gives. Two
///   heartbeats a second reach either of the manager's two threads, so the later counts have gaps.
const STEPS: [(&str, &[u64]); 3] = [
    ("pwrite64", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]),
    ("fdatasync", &[1, 2, 3, 4]),
    ("writev", &[1, 2, 3, 5, 8, 30]),
];

/// Has 4 MiB more for each line of its input, reads and writes all of it at random meanwhile, and
/// verifies it.
const PROGRAM: &str = "
import random, select, sys
PAGE, STEP = 4096, 1024
chunks, expected = [], []
def place(page):
    return chunks[page // STEP], page % STEP * PAGE
def read(page):
    chunk, at = place(page)
    return int.from_bytes(chunk[at:at + 8], 'little')
def write(page):
    chunk, at = place(page)
    chunk[at:at + 8] = expected[page].to_bytes(8, 'little')
def grow():
    chunks.append(bytearray(STEP * PAGE))
    for page in range(len(expected), len(expected) + STEP):
        expected.append(page + 1)
        write(page)
for _ in range(26):
    grow()
print('grown', flush=True)
while True:
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        grow()
        print('grown', flush=True)
    for _ in range(256):
        page = random.randrange(len(expected))
        assert read(page) == expected[page]
        if page % 3 == 0:
            expected[page] += 1 << 32
            write(page)
assert all(read(page) == expected[page] for page in range(len(expected)))
print('verified')
";

/// A manager with a registry, and two nodes that tell of themselves without it.
struct Hosts<'a> {
    hecaton: &'a Path,
    url: String,
    manager: Running,
    metrics: Vec<String>,
    _nodes: Vec<Running>,
    scratch: tempfile::TempDir,
    state: tempfile::TempDir,
}

impl Hosts<'_> {
    fn start(hecaton: &Path) -> anyhow::Result<Hosts<'_>> {
        let scratch = scratch()?;
        let state = state_dir()?;
        let (manager, url) = start_manager(hecaton, &scratch, &state, "127.0.0.1:0")?;
        let metrics = free(LENDS.len());
        let nodes = LENDS.iter().zip(&metrics).zip(["a", "b"]).map(|((lends, metrics), name)| {
            Running::spawn(
                Command::new(hecaton)
                    .args(["node", "--name", name, "--lend", &lends.to_string()])
                    .args(["--manager", &url, "--metrics", metrics, "--dir"])
                    .arg(scratch.path().join(name))
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(log_in(&scratch)?),
            )
        });
        let nodes = nodes.collect::<anyhow::Result<_>>()?;
        let hosts = Hosts { hecaton, url, manager, metrics, _nodes: nodes, scratch, state };
        hosts.eventually("both nodes serve", |status| {
            Ok(all(status, "donors").filter(|donor| donor["state"] == "serving").count() == 2)
        })?;
        Ok(hosts)
    }

    fn program(&self) -> anyhow::Result<(Running, BufReader<ChildStdout>)> {
        let mut command = Command::new(self.hecaton);
        command.args(["run", "--local", "16M", "--dir"]).arg(self.scratch.path().join("a"));
        command.args(["--", "python3", "-c", PROGRAM]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log_in(&self.scratch)?);
        let mut running = Running::spawn(&mut command)?;
        let output = running.output()?;
        let mut output = BufReader::new(output);
        grown(&mut output)?;
        Ok((running, output))
    }

    fn status(&self) -> anyhow::Result<Value> {
        Ok(ureq::get(format!("{}/v1/status", self.url)).call()?.body_mut().read_json()?)
    }

    /// Waits, and looks at all books meanwhile.
    fn eventually(
        &self,
        what: &str,
        condition: impl Fn(&Value) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let log = || std::fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default();
        let looked = |status: &Value| {
            lent(status)?;
            condition(status)
        };
        eventually(|| self.status(), what, PATIENCE, looked).with_context(log)
    }

    /// Pages that each node may use of the pool, as the nodes themselves have it.
    fn quotas(&self) -> anyhow::Result<Vec<u64>> {
        let quota = |address: &String| {
            let text = ureq::get(format!("http://{address}/metrics"))
                .call()?
                .body_mut()
                .read_to_string()?;
            let bytes = text.lines().find_map(|line| {
                line.strip_prefix("hecaton_node_quota_bytes{")?
                    .split(' ')
                    .nth(1)?
                    .parse::<f64>()
                    .ok()
            });
            Ok(bytes.unwrap_or_default() as u64 / PAGE)
        };
        self.metrics.iter().map(quota).collect()
    }

    /// Orders that nodes ask for so many pages at a time; whether that was answered.
    fn order(&self, request_pages: u64) -> anyhow::Result<bool> {
        let policy = json!({ "policy": "greedy-remote", "request_pages": request_pages });
        match ureq::put(format!("{}/v1/policy", self.url)).send_json(policy) {
            Ok(_) => Ok(true),
            Err(error @ ureq::Error::StatusCode(_)) => Err(error.into()),
            Err(_) => Ok(false),
        }
    }

    fn is_killed(&mut self) -> anyhow::Result<bool> {
        Ok(self.manager.child_mut().try_wait()?.is_some())
    }

    fn start_again(&mut self) -> anyhow::Result<()> {
        let address = self.url.trim_start_matches("http://").to_owned();
        (self.manager, _) = start_manager(self.hecaton, &self.scratch, &self.state, &address)?;
        Ok(())
    }

    /// Waits until the manager has heard all quotas, and all that is lent is somebody's to use,
    /// once. Returns the quotas, as nodes have them when no grant is on its way: the first has no
    /// less than it had been granted.
    fn settled(&self, granted: u64) -> anyhow::Result<Vec<u64>> {
        self.eventually("the quotas are what is lent", |status| {
            let is_old = status["uptime_ms"].as_u64() > Some(LISTENED_MS);
            Ok(is_old && told(status).iter().sum::<u64>() == POOL_PAGES)
        })?;
        let quotas = until("the nodes' quotas are what is lent", PATIENCE, || {
            let quotas = self.quotas()?;
            let are_all = quotas.iter().sum::<u64>() == POOL_PAGES;
            Ok(if are_all { Ok(quotas) } else { Err(format!("{quotas:?} of {POOL_PAGES} pages")) })
        })?;
        ensure!(quotas[0] >= granted, "of {granted} pages, {quotas:?} are left");
        Ok(quotas)
    }
}

fn grown(output: &mut BufReader<ChildStdout>) -> anyhow::Result<()> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(line == "grown\n", "the program does not grow: {line:?}");
    Ok(())
}

/// The quotas that nodes have told of.
fn told(status: &Value) -> Vec<u64> {
    let nodes = status["nodes"].as_array().into_iter().flatten();
    nodes.map(|node| node["pool"]["quota_pages"].as_u64().unwrap_or_default()).collect()
}

/// Pages that all donors have lent. Each donor lends what it has once, to those that it names.
fn lent(status: &Value) -> anyhow::Result<u64> {
    let mut all_lent = 0;
    for donor in all(status, "donors").filter(|donor| !donor["stats"].is_null()) {
        let stats = &donor["stats"];
        let pages =
            |name: &str| stats[name].as_u64().with_context(|| format!("no {name}: {donor}"));
        let lent = pages("lent_pages")?;
        let spaces = stats["spaces"].as_array().into_iter().flatten();
        let theirs: u64 = spaces.filter_map(|space| space["pages"].as_u64()).sum();
        let there = lent + pages("leaving_pages")? + pages("free_pages")?;
        ensure!(theirs == lent, "a donor has lent {lent} pages, and {theirs} are told of: {donor}");
        ensure!(there == pages("pages")?, "{there} pages are lent, on their way or free: {donor}");
        all_lent += lent;
    }
    Ok(all_lent)
}

/// A debugger that kills a process as it enters a system call for the n-th time.
fn kill_at(id: u32, call: &str, nth: u64) -> anyhow::Result<Result<Running, String>> {
    let mut command = Command::new("strace");
    command.args(["-f", "-o", "/dev/null", "-p", &id.to_string(), "-e", &format!("trace={call}")]);
    command.args(["-e", &format!("inject={call}:signal=SIGKILL:when={nth}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut tracer = Running::spawn(&mut command)?;
    let said = tracer.child_mut().stderr.take().context("no output")?;
    let mut said = BufReader::new(said);
    let mut line = String::new();
    said.read_line(&mut line)?;
    if !line.contains("attached") {
        return Ok(Err(format!("processes cannot be traced here: {}", line.trim())));
    }
    // A full pipe must not stop strace: drain its messages about further threads.
    thread::spawn(move || said.read_to_end(&mut Vec::new()));
    Ok(Ok(tracer))
}

/// An order is taken, or not, and never forgotten once it is answered; a grant that a manager dies
/// over is made by the next one, and what was granted before stays; nothing is anybody's twice; the
/// program notices nothing.
pub(crate) fn are_made_once_wherever_the_manager_is_killed(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing_any(&["python3", "strace"]) {
        return Ok(Outcome::Skipped(reason));
    }
    let mut hosts = Hosts::start(&cluster.hecaton)?;
    let (mut program, mut output) = hosts.program()?;
    let mut request = REQUEST_PAGES;
    ensure!(hosts.order(request)?, "the first order is not answered");
    hosts.eventually("there is something to forget", |status| {
        Ok(told(status).first() > Some(&(LENDS[0] / PAGE + GRANTED_PAGES)))
    })?;
    let mut granted = hosts.quotas()?[0];
    let mut orders = 0;
    let mut kills = Vec::new();
    for (call, steps) in STEPS {
        let mut is_over = false;
        for &nth in steps {
            let what = format!("killed at {call} {nth}");
            if call == "writev" {
                // An order's disk writes end before the manager grants memory: only the steps of
                // `writev` must settle first.
                granted = hosts.settled(granted)?[0];
            }
            let tracer = match kill_at(hosts.manager.id(), call, nth)? {
                Ok(tracer) => tracer,
                Err(reason) => return Ok(Outcome::Skipped(reason)),
            };
            orders += 1;
            let ordered = REQUEST_PAGES + orders;
            let is_answered = hosts.order(ordered)?;
            if is_answered && call == "writev" {
                writeln!(program.child_mut().stdin.as_mut().context("no input")?)?;
                grown(&mut output)?;
                let begun = Instant::now();
                let is_granted =
                    |now: &[u64]| now.iter().sum::<u64>() == POOL_PAGES && now[0] > granted;
                let over = format!("{what}: it is killed, or grants more than {granted} pages");
                until_every(Duration::from_millis(50), &over, PATIENCE, || {
                    if hosts.is_killed()? {
                        return Ok(Ok(()));
                    }
                    if begun.elapsed() < GRANTING {
                        return Ok(Err("it has just been asked".to_owned()));
                    }
                    let quotas = hosts.quotas()?;
                    Ok(if is_granted(&quotas) { Ok(()) } else { Err(format!("{quotas:?}")) })
                })?;
            }
            // A manager that did not answer is being killed: wait for its end.
            let is_killed = match is_answered {
                true => hosts.is_killed()?,
                false => hosts.manager.wait(PATIENCE, || Ok(())).map(|_| true)?,
            };
            drop(tracer);
            let is_killed = is_killed || hosts.is_killed()?;
            if !is_killed {
                request = ordered;
                is_over = true;
                break;
            }
            kills.push(what.clone());
            hosts.start_again().with_context(|| what.clone())?;
            let found =
                hosts.status().with_context(|| what.clone())?["policy"]["request_pages"].as_u64();
            let may_be = found == Some(ordered) || !is_answered && found == Some(request);
            ensure!(
                may_be,
                "{what}, answered: {is_answered}: of {request} and then {ordered} it knows {found:?}"
            );
            request = found.context("no policy")?;
        }
        ensure!(is_over, "{call}: killed at all of {steps:?}");
    }
    granted = hosts.settled(granted)?[0];
    // The last order was answered with nobody to kill the manager.
    kill_dead(hosts.manager.id());
    hosts.manager.wait(PATIENCE, || Ok(()))?;
    hosts.start_again()?;
    let known = hosts.status()?["policy"]["request_pages"].as_u64();
    ensure!(known == Some(request), "it knows {known:?}, not {request}");
    granted = hosts.settled(granted)?[0];
    ensure!(kills.len() > STEPS.len(), "it was only {kills:?}");

    // And as all of it goes back.
    let tracer = kill_at(hosts.manager.id(), "writev", 1)?.map_err(anyhow::Error::msg)?;
    drop(program.child_mut().stdin.take());
    let ended = program.wait(LONG, || Ok(()))?;
    let mut said = String::new();
    output.read_to_string(&mut said)?;
    ensure!(ended.success() && said == "verified\n", "it ended with {ended}: {said:?}");
    hosts.manager.wait(PATIENCE, || Ok(()))?;
    drop(tracer);
    hosts.start_again()?;
    hosts.eventually("all extents are back in the pool", |status| {
        let leaving =
            all(status, "donors").filter_map(|one| one["stats"]["leaving_pages"].as_u64());
        Ok(all(status, "donors").filter(|one| !one["stats"].is_null()).count() == LENDS.len()
            && lent(status)? + leaving.sum::<u64>() == 0
            && all(status, "consumers").count() == 0)
    })?;
    hosts.settled(granted)?;
    Ok(Outcome::Passed)
}
