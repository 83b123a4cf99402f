//! The manager's registry on disk: what a manager that is killed leaves to the next, and what it
//! makes of a file that is not as it was.

use crate::common::{Daemon, get, hecaton, scratch, signal_process, text, wait, wait_until_so};
use hecaton_testkit::wait_until_seen;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

/// A directory for a registry, where an order is answered in time.
fn memory() -> tempfile::TempDir {
    let place = hecaton_testkit::fast_dir();
    tempfile::Builder::new().prefix("hct-").tempdir_in(place).expect("a directory")
}

fn manager(state: &Path, listen: &str) -> Command {
    let mut command = hecaton();
    command.args(["manager", "--json", "--listen", listen, "--state"]).arg(state);
    command
}

/// Where a manager listens that is to be found again there.
fn address(manager: &Daemon) -> String {
    manager.manager().strip_prefix("http://").expect("a URL").to_owned()
}

fn node(name: &str, dir: &Path, manager: &str) -> Child {
    let mut command = hecaton();
    command.args(["node", "--lend", "64M", "--name", name, "--manager", manager, "--dir"]).arg(dir);
    command.stderr(Stdio::null()).spawn().expect("starts")
}

fn status(manager: &str) -> Value {
    serde_json::from_str(&get(&format!("{manager}/v1/status"))).expect("JSON")
}

/// Waits until the manager has heard `name`, and says how its donor is.
fn heard(manager: &str, name: &str) -> Value {
    wait_until_seen(&format!("node {name} is heard"), || {
        let status = status(manager);
        let donor = status["nodes"].as_array().and_then(|nodes| {
            let is_heard = |node: &&Value| node["name"] == name && node["state"] == "up";
            let donor = &nodes.iter().find(is_heard)?["donors"][0];
            donor["stats"].is_object().then(|| donor.clone())
        });
        donor.ok_or(status)
    })
}

#[test]
fn a_killed_manager_is_followed_by_one_that_knows() {
    let scratch = scratch();
    let kept = memory();
    let state = kept.path().join("state");
    let first = Daemon::start(&mut manager(&state, "127.0.0.1:0"));
    let address = address(&first);
    let url = first.manager().to_owned();
    let mut a = node("a", &scratch.path().join("a"), &url);
    let mut b = node("b", &scratch.path().join("b"), &url);
    heard(&url, "a");
    heard(&url, "b");
    assert_eq!(status(&url)["epoch"], 1);
    // The next manager knows only the record of `b`; `a` goes on.
    signal_process(b.id(), Signal::STOP);
    ureq::post(format!("{url}/v1/donors/a/drain")).send_empty().expect("taken");
    first.end(Signal::KILL);

    let second = Daemon::start(&mut manager(&state, &address));
    let known = status(&url);
    assert_eq!(known["epoch"], 2);
    let names = ["a", "b"].map(Value::from);
    let nodes = known["nodes"].as_array().expect("nodes").iter();
    assert!(nodes.map(|node| &node["name"]).eq(&names), "{known}");
    assert_eq!(known["nodes"][1]["state"], "silent");
    wait_until_so(
        "the donor drains",
        || heard(&url, "a"),
        |donor| donor["stats"]["draining"] == true,
    );
    second.end(Signal::KILL);

    // Cut off: refused with the way out, which works. Half a file would not do: all records may lie
    // in it, whole.
    let file = state.join("registry.redb");
    let bytes = fs::read(&file).expect("there");
    fs::write(&file, &bytes[..4096]).expect("written");
    let refused = manager(&state, &address).output().expect("runs");
    let error = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    let way_out = format!("mv {0} {0}.damaged", file.display());
    assert!(error.contains("is damaged") && error.contains(&way_out), "{error}");
    let moved = Command::new("sh").args(["-c", &way_out]).status().expect("runs");
    assert!(moved.success());
    let third = Daemon::start(&mut manager(&state, &address));
    signal_process(b.id(), Signal::CONT);
    heard(&url, "b");
    let draining = heard(&url, "a");
    assert_eq!(draining["stats"]["draining"], true);
    assert_eq!(status(&url)["epoch"], 3, "what the nodes had followed counts");
    // The next heartbeat's answer says it again, though nobody else has.
    wait_until_so(
        "the donor goes on draining",
        || heard(&url, "a"),
        |donor| donor["stats"]["draining"] == true,
    );

    for node in [&mut a, &mut b] {
        signal_process(node.id(), Signal::TERM);
        assert!(wait(node).success());
    }
    assert_eq!(status(&url)["nodes"], Value::Array(Vec::new()));
    third.end(Signal::TERM);
}

#[test]
fn a_registry_that_cannot_be_written_takes_no_order() {
    let scratch = scratch();
    let kept = memory();
    let state = kept.path().join("state");
    // A process may go on after a write beyond its limit only if it ignores the signal.
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_hecaton")])
        .args(["manager", "--json", "--listen", "127.0.0.1:0", "--state"])
        .arg(&state);
    let manager = Daemon::start(command.stderr(Stdio::null()));
    let url = manager.manager().to_owned();
    let mut a = node("a", &scratch.path().join("a"), &url);
    heard(&url, "a");
    let pid = Pid::from_raw(manager.pid() as i32);
    let limit = |current| {
        let limits = Rlimit { current, maximum: None };
        prlimit(pid, Resource::Fsize, limits).expect("limited");
    };
    let drain = || {
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
        let mut answer =
            agent.post(format!("{url}/v1/donors/a/drain")).send_empty().expect("answered");
        (answer.status().as_u16(), answer.body_mut().read_to_string().expect("text"))
    };
    limit(Some(1));
    for _ in 0..2 {
        let (status, refusal) = drain();
        assert_eq!(status, 503, "{refusal}");
        assert!(refusal.contains("registry.redb"), "{refusal}");
    }
    limit(None);
    assert_eq!(drain(), (204, String::new()));
    wait_until_so(
        "the donor drains",
        || heard(&url, "a"),
        |donor| donor["stats"]["draining"] == true,
    );
    signal_process(a.id(), Signal::TERM);
    assert!(wait(&mut a).success());
    manager.end(Signal::TERM);
}

/// A library for a manager whose disk is slow: `fdatasync` waits for as long as somebody has an
/// exclusive lock on the file `$GATE`, and makes `$GATE.met` first.
const GATE: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

int fdatasync(int fd) {
    int gate = open(getenv("GATE"), O_RDONLY | O_CLOEXEC);
    if (flock(gate, LOCK_SH | LOCK_NB) != 0) {
        char met[4096];
        snprintf(met, sizeof met, "%s.met", getenv("GATE"));
        close(open(met, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        flock(gate, LOCK_SH);
    }
    close(gate);
    return syscall(SYS_fdatasync, fd);
}
"#;

/// A command whose order the manager has taken and not written: it has said that it waits.
struct Ordering {
    command: Child,
    _stderr: BufReader<ChildStderr>,
}

impl Ordering {
    fn start(url: &str, args: &[&str]) -> Ordering {
        let mut command = hecaton();
        command.args(args).args(["--manager", url]).stderr(Stdio::piped());
        let mut command = command.spawn().expect("starts");
        let mut stderr = BufReader::new(command.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        assert!(line.contains("its registry takes long to write"), "{line}");
        assert!(command.try_wait().expect("asked").is_none(), "it promises what is not written");
        Ordering { command, _stderr: stderr }
    }
}

#[test]
fn whoever_only_asks_does_not_wait_for_a_registry_that_is_slow_to_write() {
    let scratch = scratch();
    let kept = memory();
    let (state, place) = (kept.path().join("state"), scratch.path().join("gate"));
    let gate = File::create(&place).expect("created");
    let (source, library) = (scratch.path().join("gate.c"), scratch.path().join("gate.so"));
    fs::write(&source, GATE).expect("written");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]);
    assert!(compiler.status().expect("a C compiler, as Rust needs one").success());
    let mut command = manager(&state, "127.0.0.1:0");
    command.env("LD_PRELOAD", &library).env("GATE", &place).stderr(Stdio::null());
    let manager = Daemon::start(&mut command);
    let url = manager.manager().to_owned();
    let mut a = node("a", &scratch.path().join("a"), &url);
    let mut gone = node("gone", &scratch.path().join("gone"), &url);
    heard(&url, "a");
    let donor = heard(&url, "gone")["pid"].as_u64().expect("a process");
    signal_process(gone.id(), Signal::KILL);
    gone.wait().expect("killed");
    signal_process(donor as u32, Signal::KILL);

    gate.lock().expect("locked");
    let mut drain = Ordering::start(&url, &["node", "drain", "a"]);
    assert!(scratch.path().join("gate.met").exists(), "nothing waits for the disk");
    // A node that begins is listed: its heartbeats are taken, and others may read.
    let mut b = node("b", &scratch.path().join("b"), &url);
    heard(&url, "b");
    let agent = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    let lift = agent.delete(format!("{url}/v1/policy")).header("prefer", "wait=0");
    let slow = lift.call().expect("answered");
    assert_eq!((slow.status().as_u16(), slow.headers().contains_key("retry-after")), (504, true));
    let unknown = agent.post(format!("{url}/v1/donors/x/drain")).send_empty().expect("answered");
    assert_eq!(unknown.status().as_u16(), 404, "a refusal promises nothing, and need not wait");
    assert!(drain.command.try_wait().expect("asked").is_none());
    gate.unlock().expect("unlocked");
    assert!(wait(&mut drain.command).success());
    wait_until_so(
        "the donor drains",
        || heard(&url, "a"),
        |donor| donor["stats"]["draining"] == true,
    );

    // The manager has forgotten the node when it is asked again.
    wait_until_so(
        "the node is missed",
        || status(&url),
        |status| {
            let nodes = status["nodes"].as_array().expect("nodes");
            nodes.iter().any(|node| node["name"] == "gone" && node["state"] == "silent")
        },
    );
    gate.lock().expect("locked");
    let mut remove = Ordering::start(&url, &["node", "remove", "gone"]);
    gate.unlock().expect("unlocked");
    assert!(wait(&mut remove.command).success());
    for node in [&mut a, &mut b] {
        signal_process(node.id(), Signal::TERM);
        assert!(wait(node).success());
    }

    // A manager ends although its disk does not answer.
    gate.lock().expect("locked");
    let set = ["policy", "set", "greedy-local"];
    let mut set = Ordering::start(&url, &set);
    assert!(manager.end(Signal::TERM).success());
    assert!(!wait(&mut set.command).success());
}
