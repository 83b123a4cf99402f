//! `hecaton node list` and `remove`, and what becomes of nodes that come and go.

use crate::common::{Daemon, hecaton, lends, scratch, signal_process, text, wait, wait_until_so};
use hecaton_node::cluster::heartbeat::ManagerLink;
use hecaton_node::cluster::membership::Membership;
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::pagers::{ConsumerReport, PagerState};
use hecaton_pager::{DonorUse, Stats};
use hecaton_testkit::unused_port;
use hecaton_testkit::wait_until;
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A node that ends with the test.
struct Node(Child);

impl Node {
    fn start(name: &str, dir: &Path, manager: &str, adopt_within: &str) -> Node {
        let mut command = hecaton();
        command.args(["node", "--lend", "64M", "--name", name, "--manager", manager]);
        command.args(["--adopt-within", adopt_within, "--dir"]).arg(dir);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Node(command.spawn().expect("starts"))
    }

    fn kill(mut self) {
        signal_process(self.0.id(), Signal::KILL);
        wait(&mut self.0);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            signal_process(self.0.id(), Signal::TERM);
            wait(&mut self.0);
        }
    }
}

fn on(manager: &str, arguments: &[&str]) -> Output {
    hecaton().arg("node").args(arguments).args(["--manager", manager]).output().expect("runs")
}

fn listed(manager: &str) -> Vec<Value> {
    let ended = on(manager, &["list", "--json"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let shown: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    shown["nodes"].as_array().expect("nodes").clone()
}

fn node_of(manager: &str, name: &str) -> Option<Value> {
    listed(manager).into_iter().find(|node| node["name"] == name)
}

/// Waits until a node is heard and takes part in that way.
fn wait_until_takes_part(manager: &str, name: &str, membership: &str) -> Value {
    let node = || node_of(manager, name).unwrap_or_default();
    wait_until_so(&format!("node {name} is {membership}"), node, |node| {
        let is_so = node["state"] == "up" && node["membership"] == membership;
        is_so && node["lent_bytes"].is_u64()
    })
}

/// The node's state, as people see it.
fn shown(manager: &str, name: &str) -> String {
    let table = text(&on(manager, &["list"]).stdout);
    let line = table.lines().find(|line| line.starts_with(&format!("{name} ")));
    let word = line.and_then(|line| line.split_whitespace().nth(1));
    word.unwrap_or_else(|| panic!("{table}")).to_owned()
}

/// The node, as `GET /v1/status` has it.
fn status_of(manager: &str, name: &str) -> Value {
    let output = hecaton().args(["status", "--json", "--manager", manager]).output().expect("runs");
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let nodes = status["nodes"].as_array().expect("nodes");
    nodes.iter().find(|node| node["name"] == name).expect("the node").clone()
}

/// Its donor.
fn donor_of(manager: &str, name: &str) -> Value {
    status_of(manager, name)["donors"][0].clone()
}

#[test]
fn a_node_that_is_gone_is_listed_until_it_is_removed() {
    let scratch = scratch();
    let manager = Daemon::manage("127.0.0.1:0");
    let url = manager.manager();
    assert!(listed(url).is_empty());
    let node = Node::start("a", &scratch.path().join("a"), url, "0");
    let lends = wait_until_takes_part(url, "a", "active");
    assert_eq!(lends["lend_bytes"], 64 << 20);
    assert_eq!(shown(url, "a"), "up");

    let refused = |name: &str, why: &str| {
        let ended = on(url, &["remove", name]);
        let said = text(&ended.stderr);
        assert!(ended.status.code() == Some(1) && said.contains(why), "{said}");
    };
    refused("a", "node `a` runs");
    refused("b", "there is no node `b`");
    assert_eq!(on(url, &["remove", "a/b"]).status.code(), Some(2));

    node.kill();
    let node_now = || node_of(url, "a").unwrap_or_default();
    wait_until_so("the node is missed", node_now, |node| node["state"] == "silent");
    let ended = on(url, &["remove", "a"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert!(listed(url).is_empty());
}

/// A node of the test's own, that says that its program has memory at `a` for as long as it is told
/// to.
struct Borrower {
    holds: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Borrower {
    fn start(manager: &str) -> Borrower {
        let (holds, ends) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
        let link = ManagerLink::new(manager, None);
        let thread = thread::spawn({
            let (holds, ends) = (Arc::clone(&holds), Arc::clone(&ends));
            move || {
                let mut membership = Membership::start("borrower", 1, 0, false);
                while !ends.load(Ordering::SeqCst) {
                    let bytes = if holds.load(Ordering::SeqCst) { 16 << 20 } else { 0 };
                    let mut report = borrower_report(bytes);
                    report.member = membership.report();
                    if let Ok(answer) = link.beat(&report) {
                        membership.follow(&answer.orders, false, 2);
                    }
                    thread::sleep(Duration::from_millis(200));
                }
            }
        });
        Borrower { holds, ends, thread: Some(thread) }
    }
}

impl Drop for Borrower {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn borrower_report(bytes: u64) -> NodeReport {
    let mut stats = Stats::default();
    stats.pool.donors = vec![DonorUse { name: "a".to_owned(), bytes, ..DonorUse::default() }];
    let program = ConsumerReport {
        name: "p".to_owned(),
        state: PagerState::Serving,
        stats: Some(stats),
        ..ConsumerReport::default()
    };
    NodeReport {
        name: "borrower".to_owned(),
        boot: 1,
        consumers: vec![program],
        ..NodeReport::default()
    }
}

/// Starts a node, which lends something and is killed, and another in its place, whose donor
/// outlives it. The donor of the first, and the second.
fn killed_and_started_again(dir: &Path, manager: &str, adopt_within: &str) -> (Value, Node) {
    let node = Node::start("a", dir, manager, adopt_within);
    wait_until_takes_part(manager, "a", "active");
    let before = donor_of(manager, "a");
    // The donor is told some time after the manager knows of the node.
    wait_until("the donor lends", || lends(&before, 1));
    node.kill();
    (before, Node::start("a", dir, manager, "60"))
}

#[test]
fn a_node_that_was_killed_lends_again_when_nobody_counts_on_what_it_lent() {
    let scratch = scratch();
    let manager = Daemon::manage("127.0.0.1:0");
    let url = manager.manager();
    let borrower = Borrower::start(url);
    // Its donor ends with it, and what that lent.
    let (before, _node) = killed_and_started_again(&scratch.path().join("a"), url, "0");
    wait_until_takes_part(url, "a", "recovery");
    let donor = || donor_of(url, "a");
    let after = wait_until_so("the new donor is heard of", donor, |donor| {
        donor["pid"] != before["pid"] && donor["stats"]["draining"] == true
    });
    assert!(!lends(&after, 2), "it lends while somebody counts on what it lent before");
    assert_eq!(shown(url, "a"), "recovery");
    let status = text(&hecaton().args(["status", "--manager", url]).output().unwrap().stdout);
    assert!(status.lines().any(|line| line.starts_with("a ") && line.contains("recovery")));

    borrower.holds.store(false, Ordering::SeqCst);
    wait_until_takes_part(url, "a", "active");
    wait_until("the donor lends", || lends(&donor_of(url, "a"), 3));
}

#[test]
fn a_node_that_is_killed_while_it_recovers_is_followed_by_one_that_does() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let listen = format!("127.0.0.1:{}", unused_port());
    let manager = Daemon::manage(&listen);
    let url = format!("http://{listen}");
    let borrower = Borrower::start(&url);
    let (_, node) = killed_and_started_again(&dir, &url, "0");
    wait_until_takes_part(&url, "a", "recovery");
    node.kill();
    let node = Node::start("a", &dir, &url, "60");
    let node_now = || status_of(&url, "a");
    wait_until_so("the next node is heard", node_now, |shown| shown["pid"] == node.0.id());
    wait_until_takes_part(&url, "a", "recovery");
    assert!(
        !lends(&donor_of(&url, "a"), 2),
        "it lends while somebody counts on what it lent before"
    );

    // Nobody has told its donor to drain, which another manager would have it go on with.
    node.kill();
    drop(manager);
    borrower.holds.store(false, Ordering::SeqCst);
    let _manager = Daemon::manage(&listen);
    let _node = Node::start("a", &dir, &url, "60");
    wait_until_takes_part(&url, "a", "active");
    wait_until("the donor lends", || lends(&donor_of(&url, "a"), 3));
}

#[test]
fn a_node_that_is_adopted_whole_has_nothing_to_recover() {
    let scratch = scratch();
    let manager = Daemon::manage("127.0.0.1:0");
    let url = manager.manager();
    let _borrower = Borrower::start(url);
    let dir = scratch.path().join("a");
    let (before, _node) = killed_and_started_again(&dir, url, "60");
    let donor = || donor_of(url, "a");
    let after = wait_until_so("the donor is adopted", donor, |donor| {
        donor["pid"] == before["pid"] && dir.join("node.sock").exists()
    });
    // Somebody has memory there, and that is still good.
    wait_until_takes_part(url, "a", "active");
    assert!(lends(&after, 2));
}

#[test]
fn a_node_that_is_drained_has_left_and_may_join_again() {
    let scratch = scratch();
    let manager = Daemon::manage("127.0.0.1:0");
    let url = manager.manager();
    let borrower = Borrower::start(url);
    let _node = Node::start("a", &scratch.path().join("a"), url, "0");
    wait_until_takes_part(url, "a", "active");
    assert!(on(url, &["drain", "a"]).status.success());
    // Nothing is lent; but one says that it has something there.
    wait_until_takes_part(url, "a", "leaving");
    assert!(on(url, &["drain", "a", "--cancel"]).status.success());
    wait_until_takes_part(url, "a", "active");
    assert!(on(url, &["drain", "a"]).status.success());
    borrower.holds.store(false, Ordering::SeqCst);
    wait_until_takes_part(url, "a", "inactive");
    assert_eq!(shown(url, "a"), "left");
    assert!(on(url, &["drain", "a", "--cancel"]).status.success());
    wait_until_takes_part(url, "a", "active");
    wait_until("the donor lends", || lends(&donor_of(url, "a"), 3));
}
