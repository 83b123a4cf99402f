//! The kinds of memory that a donor lends: of one NUMA node, in huge pages.

use crate::common::{
    Daemon, borrow, donor_pids, hecaton, scratch, signal_process, status, wait_until_so,
};
use hecaton_memory::memfd::{Backing, SharedMemory};
use hecaton_memory::numa::{self, SYSFS_NODES};
use hecaton_memory::{Generation, PAGE_SIZE, page_sum};
use hecaton_testkit::wait_until_seen;
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::Request;
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages that a donor of 64 MiB takes.
const WANTED: u64 = 32;

/// Sets huge pages aside, and gives them back however the test ends.
struct SetAside {
    before: String,
}

impl SetAside {
    fn more(pages: u64) -> Result<SetAside, String> {
        let read = || std::fs::read_to_string(NR_HUGEPAGES).map_err(|error| error.to_string());
        let count = |text: &str| text.trim().parse::<u64>().map_err(|error| error.to_string());
        let before = read()?;
        let wanted = count(&before)? + pages;
        std::fs::write(NR_HUGEPAGES, wanted.to_string())
            .map_err(|error| format!("{NR_HUGEPAGES} cannot be written: {error}"))?;
        let set_aside = SetAside { before };
        match count(&read()?)? {
            got if got < wanted => Err(format!("the kernel set {got} of {wanted} pages aside")),
            _ => Ok(set_aside),
        }
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let _ = std::fs::write(NR_HUGEPAGES, &self.before);
    }
}

fn donor(dir: &Path) -> Value {
    status(dir)["nodes"][0]["donors"][0].clone()
}

fn committed(dir: &Path, bytes: u64) -> Value {
    wait_until_so(
        &format!("{bytes} bytes are committed"),
        || donor(dir),
        |donor| donor["stats"]["committed_bytes"] == bytes,
    )
}

#[test]
fn huge_pages_are_lent_and_given_back() {
    let _set_aside = match SetAside::more(WANTED) {
        Ok(set_aside) => set_aside,
        Err(reason) => return println!("skipped: huge_pages_are_lent_and_given_back: {reason}"),
    };
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let mut dev = hecaton();
    dev.args(["dev", "--json", "--donors", "1", "--lend", "64M", "--huge-pages", "--dir"]);
    let _dev = Daemon::start(dev.arg(&dir));
    let shown = committed(&dir, 0);
    assert_eq!(shown["memory"]["huge_pages"], true);

    let page = [9u8; PAGE_SIZE];
    let mut before = borrow(&shown, 1).expect("welcomed");
    // Committed whole with the extent, and not as it is written.
    let allocate = Request::Allocate { segment: 0, member: 0, order: 9, generation: Generation(1) };
    let Outcome::Allocated(extent) = before.call(allocate, &[]).expect("answered") else {
        panic!("no extent");
    };
    committed(&dir, 2 << 20);
    let write =
        Request::Write { extent, generation: Generation(1), pages: &[0], sums: &[page_sum(&page)] };
    assert_eq!(before.call(write, &[&page]).expect("answered"), Outcome::Done);

    signal_process(donor_pids(&status(&dir))[0], Signal::KILL);
    let mut after = wait_until_seen("the donor is back", || borrow(&shown, 2));
    let read = after.call(Request::Read { extent, pages: &[0] }, &[]).expect("answered");
    assert_eq!(read, Outcome::Pages { sums: vec![page_sum(&page)], data: page.to_vec() });
    let free = after.call(Request::Free { extent }, &[]).expect("answered");
    assert_eq!(free, Outcome::Done);
    committed(&dir, 0);
}

#[test]
fn a_numa_node_is_chosen() {
    let Some(node) = numa::nodes(Path::new(SYSFS_NODES)).expect("read").last().copied() else {
        return println!("skipped: a_numa_node_is_chosen: this kernel knows no NUMA");
    };
    let probe = SharedMemory::create("probe", PAGE_SIZE as u64, Backing::BasePages).expect("made");
    if let Err(error) = probe.bind(0..PAGE_SIZE as u64, node.node) {
        return println!("skipped: a_numa_node_is_chosen: memory cannot be bound here: {error}");
    }
    for chosen in [Some(node.node), None] {
        let scratch = scratch();
        let dir = scratch.path().join("dev");
        let number = chosen.map_or_else(|| "all".to_owned(), |node| node.to_string());
        let mut dev = hecaton();
        dev.args(["dev", "--json", "--donors", "1", "--lend", "64M", "--numa", &number, "--dir"]);
        let _dev = Daemon::start(dev.arg(&dir));
        let donor = wait_until_so(
            "the donor tells its zones",
            || donor(&dir),
            |donor| donor["stats"]["zones"].is_array(),
        );
        assert_eq!(donor["memory"]["numa_node"].as_u64(), chosen.map(u64::from));
        let zones = donor["stats"]["zones"].as_array().expect("zones");
        if chosen.is_some() || zones.len() == 1 {
            assert_eq!(zones[0]["node"].as_u64(), chosen.map(u64::from));
        }
    }
}
