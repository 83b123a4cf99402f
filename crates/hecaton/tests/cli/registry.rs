//! The manager's registry on disk: what a manager that is killed leaves to the next, and what it
//! makes of a file that is not as it was.

use crate::common::{Daemon, get, hecaton, scratch, signal_process, text, wait, wait_until_so};
use hecaton_testkit::wait_until_seen;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

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
    let state = scratch.path().join("state");
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

    // Cut off: refused with the way out, which works.
    let file = state.join("registry.redb");
    let bytes = fs::read(&file).expect("there");
    fs::write(&file, &bytes[..bytes.len() / 2]).expect("written");
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
    let state = scratch.path().join("state");
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
