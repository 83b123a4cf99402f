//! A node daemon that is killed and started again: what it had started goes on meanwhile, and is
//! the next one's.

use crate::common::{Daemon, borrow, hecaton, lends, runs, scratch, signal_process, text, wait};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, page_sum};
use hecaton_node::cluster::report::NodeReport;
use hecaton_node::donors::{DonorReport, DonorState};
use hecaton_node::socket::client::NodeClient;
use hecaton_testkit::unused_port;
use hecaton_testkit::{wait_until, wait_until_seen};
use hecaton_transport::client::{Connection, Outcome};
use hecaton_transport::protocol::Request;
use rustix::process::Signal;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

/// A manager that is not there.
const NOBODY: &str = "http://127.0.0.1:1";

fn node_command(dir: &Path, options: &[&str]) -> Command {
    let mut command = hecaton();
    command.args(["node", "--name", "a"]).args(options).arg("--dir").arg(dir).stderr(Stdio::null());
    command
}

/// Adopted within a time that is long enough for a test, and short enough for what a failed one
/// leaves.
fn lend(manager: &str) -> [&str; 6] {
    ["--lend", "64M", "--adopt-within", "60", "--manager", manager]
}

/// A node, ended with the test.
struct Node {
    child: Child,
    dir: PathBuf,
}

impl Node {
    fn start(dir: &Path, options: &[&str]) -> Node {
        let child = node_command(dir, options).spawn().expect("starts");
        let mut node = Node { child, dir: dir.to_owned() };
        let pid = node.child.id();
        wait_until("the node is open", || {
            let ended = node.child.try_wait().expect("a child");
            assert!(ended.is_none(), "it ended with {ended:?}");
            node.report().is_some_and(|report| report.pid == pid)
        });
        node
    }

    fn report(&self) -> Option<NodeReport> {
        NodeClient::connect(&self.dir.join("node.sock")).ok()?.status().ok()
    }

    fn donor(&self) -> DonorReport {
        self.report().expect("it answers").donors.remove(0)
    }

    fn end(mut self, signal: Signal) -> ExitStatus {
        signal_process(self.child.id(), signal);
        wait(&mut self.child)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal_process(self.child.id(), Signal::TERM);
            wait(&mut self.child);
        }
    }
}

fn connect(donor: &DonorReport, lane: u64) -> Connection {
    borrow(&value(donor), lane).expect("welcomed")
}

fn value(donor: &DonorReport) -> Value {
    serde_json::to_value(donor).expect("JSON")
}

const PAGE: [u8; PAGE_SIZE] = [7u8; PAGE_SIZE];

fn write_page(connection: &mut Connection) -> ExtentId {
    let allocate = Request::Allocate { segment: 0, member: 0, order: 4, generation: Generation(1) };
    let Outcome::Allocated(extent) = connection.call(allocate, &[]).expect("answered") else {
        panic!("no extent");
    };
    let (pages, sums) = (&[3][..], &[page_sum(&PAGE)][..]);
    let write = Request::Write { extent, generation: Generation(1), pages, sums };
    assert_eq!(connection.call(write, &[&PAGE]).expect("answered"), Outcome::Done);
    extent
}

fn expect_page(connection: &mut Connection, extent: ExtentId) {
    let read = connection.call(Request::Read { extent, pages: &[3] }, &[]).expect("answered");
    assert_eq!(read, Outcome::Pages { sums: vec![page_sum(&PAGE)], data: PAGE.to_vec() });
}

#[test]
fn a_donor_serves_without_its_node_and_is_the_next_ones() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let manager = Daemon::manage("127.0.0.1:0");
    let lend = &lend(manager.manager());
    let mut node = Node::start(&dir, lend);
    let (before, life) = (node.donor(), node.report().expect("it answers").boot);
    let mut connection = connect(&before, 1);
    let extent = write_page(&mut connection);
    let boot = connection.welcome().map(|welcome| welcome.boot);
    for lane in [2, 3] {
        assert!(!node.end(Signal::KILL).success());
        expect_page(&mut connection, extent);
        expect_page(&mut connect(&before, lane), extent);
        node = Node::start(&dir, lend);
        assert_eq!(node.report().expect("it answers").boot, life, "for the manager it lives on");
        let donor = node.donor();
        assert_eq!((donor.pid, donor.address), (before.pid, before.address));
        assert_eq!((donor.restarts, donor.state), (0, DonorState::Serving));
        expect_page(&mut connection, extent);
    }
    // Killed now, it is started again with what the node was given.
    signal_process(before.pid.expect("a process"), Signal::KILL);
    let after = wait_until_seen("the donor is back", || {
        let donor = node.donor();
        let is_back = donor.restarts == 1 && donor.state == DonorState::Serving;
        if is_back { Ok(donor) } else { Err(format!("{donor:?}")) }
    });
    assert_eq!(after.address, before.address);
    let mut connection = connect(&after, 4);
    assert_eq!(connection.welcome().map(|welcome| welcome.boot), boot);
    expect_page(&mut connection, extent);
    // That one is found, too.
    assert!(!node.end(Signal::KILL).success());
    let node = Node::start(&dir, lend);
    assert_eq!((node.donor().pid, node.donor().restarts), (after.pid, 1));
    assert!(node.end(Signal::TERM).success());
    assert!(!runs(after.pid.expect("a process")) && !dir.exists(), "something is left");
}

#[test]
fn a_donor_killed_without_a_node_is_a_clean_loss() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let node = Node::start(&dir, &lend(NOBODY));
    let donor = node.donor();
    let boot = connect(&donor, 1).welcome().map(|welcome| welcome.boot);
    node.end(Signal::KILL);
    signal_process(donor.pid.expect("a process"), Signal::KILL);
    assert!(dir.join("donor-1.sock").exists(), "it had no time to remove it");
    let node = Node::start(&dir, &lend(NOBODY));
    let next = node.donor();
    assert_ne!(next.pid, donor.pid);
    assert_ne!(connect(&next, 1).welcome().map(|welcome| welcome.boot), boot);
}

#[test]
fn a_donor_that_no_node_adopts_gives_its_memory_back() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let node = Node::start(&dir, &["--lend", "64M", "--adopt-within", "1", "--manager", NOBODY]);
    let pid = node.donor().pid.expect("a process");
    let address = node.donor().address.expect("an address");
    node.end(Signal::KILL);
    wait_until("the donor ends", || !runs(pid));
    assert!(!dir.join("donor-1.sock").exists());
    assert!(std::net::TcpStream::connect(address).is_err(), "its port is closed");
    let node = Node::start(&dir, &lend(NOBODY));
    assert_ne!(node.donor().pid, Some(pid));
}

/// Returns the errors of a node that does not start.
fn refused(dir: &Path, options: &[&str]) -> String {
    let mut command = node_command(dir, options);
    let Output { status, stderr, .. } = command.stderr(Stdio::piped()).output().expect("runs");
    assert_eq!(status.code(), Some(1), "{}", text(&stderr));
    text(&stderr)
}

#[test]
fn a_node_that_cannot_take_over_what_is_there_leaves_it_alone() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let manager = Daemon::manage("127.0.0.1:0");
    let lend = &lend(manager.manager());
    let node = Node::start(&dir, lend);
    let donor = node.donor();
    let pid = donor.pid.expect("a process");
    let mut connection = connect(&donor, 1);
    let extent = write_page(&mut connection);
    let second = refused(&dir, lend);
    assert!(second.contains("in use by another node"), "{second}");
    node.end(Signal::KILL);

    let other = refused(&dir, &["--lend", "128M", "--manager", manager.manager()]);
    assert!(other.contains("64M") && other.contains("128M"), "{other}");
    assert!(other.contains(&pid.to_string()), "{other}");
    signal_process(pid, Signal::STOP);
    let silent = refused(&dir, lend);
    assert!(silent.contains(&pid.to_string()) && silent.contains("does not answer"), "{silent}");
    signal_process(pid, Signal::CONT);
    expect_page(&mut connection, extent);

    let node = Node::start(&dir, lend);
    assert_eq!(node.donor().pid, Some(pid));
    expect_page(&mut connection, extent);
}

#[test]
fn a_node_that_knows_of_none_before_it_lends_when_a_manager_has_answered() {
    let scratch = scratch();
    let dir = scratch.path().join("a");
    let listen = format!("127.0.0.1:{}", unused_port());
    let url = format!("http://{listen}");
    let lend = &lend(&url);
    let mut node = Node::start(&dir, lend);
    for lane in [1, 2] {
        assert!(!lends(&value(&node.donor()), lane), "a manager may know what it lent before");
        // Nor does the next one know, which adopts the donor.
        node.end(Signal::KILL);
        node = Node::start(&dir, lend);
    }
    let manager = Daemon::manage(&listen);
    wait_until("the donor lends", || lends(&value(&node.donor()), 3));
    // From then on it is known.
    drop(manager);
    node.end(Signal::KILL);
    let node = Node::start(&dir, lend);
    assert!(lends(&value(&node.donor()), 4));
}
