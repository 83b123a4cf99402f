//! Tests space ownership with certificates: only the first node that fences is the owner.

use crate::common::*;
use hecaton_donor::{Donor, DonorConfig, Serving, listen};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, Size};
use hecaton_pki::Role;
use hecaton_pki::testing::TestAuthority;
use hecaton_transport::client::{Connection, ConnectionError, Options, Outcome};
use hecaton_transport::protocol::{FillSource, Hello, OWNERS_SINCE, Refusal, Request};
use hecaton_transport::tls::{Destination, Tls};
use std::net::SocketAddr;
use std::time::Duration;

const SPACE: u64 = 7;
const ORDER: u8 = 6;

struct Pki(TestAuthority);

impl Pki {
    fn new() -> Pki {
        Pki(TestAuthority::in_scratch())
    }

    fn config(&self, node: &str) -> DonorConfig {
        let address = ([127, 0, 0, 1], 0).into();
        let lend = Size(1000 * PAGE_SIZE as u64);
        DonorConfig {
            tls_dir: Some(self.0.issue(node, Role::Node)),
            ..DonorConfig::new(node, address, lend)
        }
    }

    /// Starts a donor on the node.
    fn lend(&self, node: &str) -> (Donor, Serving) {
        let config = self.config(node);
        let donor = Donor::open(&config, None).unwrap();
        let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
        (donor, serving)
    }

    /// Connects to the donor as the node, with this hello.
    fn open(&self, node: &str, to: SocketAddr, hello: &Hello) -> Result<Borrower, ConnectionError> {
        let credentials = self.0.credentials(node, Role::Node);
        let tls = Some(Tls { credentials, node: None });
        let to = Destination { address: to, tls };
        Connection::open(to, hello, &Options::default()).map(Borrower)
    }

    fn connect(&self, node: &str, to: SocketAddr) -> Borrower {
        self.open(node, to, &hello(SPACE, 1, LONG_LEASE)).unwrap()
    }

    /// Connects as a borrower does: its first request is a fence.
    fn borrow(&self, node: &str, to: SocketAddr, hello: &Hello) -> Borrower {
        let mut borrower = self.open(node, to, hello).unwrap();
        borrower.done(Request::Fence);
        borrower
    }

    fn own(&self, to: SocketAddr) -> Borrower {
        self.borrow("a", to, &hello(SPACE, 1, LONG_LEASE))
    }

    /// Replaces the donor by the next process, which takes over its descriptors.
    fn replace(&self, node: &str, (donor, serving): (Donor, Serving)) -> (Donor, Serving) {
        let fds = donor.fds().unwrap();
        serving.stop();
        drop(donor);
        let config = self.config(node);
        let donor = Donor::open(&config, Some(fds)).unwrap();
        let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
        (donor, serving)
    }

    /// Asserts that the donor refuses the node's connection at a low and a high epoch.
    fn assert_stranger(&self, node: &str, to: SocketAddr) {
        for epoch in [1, 99] {
            let short = hello(SPACE, epoch, Duration::from_secs(1));
            let refused = self.open(node, to, &short).map(|_| ()).unwrap_err();
            let is_refused = matches!(refused, ConnectionError::Refused(Refusal::OtherNode));
            assert!(is_refused, "{refused}");
        }
    }
}

/// Hello of a borrower whose version knows no owners.
fn earlier(epoch: u64) -> Hello {
    let versions = (OWNERS_SINCE - 1, OWNERS_SINCE - 1);
    Hello { versions, ..hello(SPACE, epoch, LONG_LEASE) }
}

/// Allocates an extent to fill from `from`, and returns the request that fills it.
fn to_fill(own: &mut Borrower, from: (SocketAddr, &Borrower, ExtentId)) -> Request<'static> {
    let generation = Generation::FILLING;
    let allocate = Request::Allocate { segment: 0, member: 0, order: ORDER, generation };
    let Outcome::Allocated(extent) = own.call(allocate) else { panic!("no extent") };
    let (address, there, from) = from;
    let source = FillSource { address, boot: there.welcome().boot, extent: from };
    Request::Fill { extent, first: 0, count: 64, source }
}

/// Asserts that the donor refuses every request but reads.
fn assert_powerless(stranger: &mut Borrower, extent: ExtentId) {
    let generation = Generation(9);
    let source = FillSource { address: ([127, 0, 0, 1], 1).into(), boot: 1, extent };
    for request in [
        Request::Discard { extent, generation, first: 0, count: 1 },
        Request::Allocate { segment: 1, member: 0, order: ORDER, generation },
        Request::Confirm { extent, generation },
        Request::Verify { extent, first: 0, count: 1 },
        Request::Sign { extent, first: 0, count: 1 },
        Request::Fill { extent, first: 0, count: 1, source },
        Request::Repair { extent, first: 0, count: 1, source },
        Request::Free { extent },
        Request::FreeAll,
        Request::List { from: ExtentId(0) },
        Request::Fence,
        Request::Renew,
        Request::Admit { node: "two" },
        Request::Bequeath { node: "b" },
    ] {
        assert_eq!(stranger.refused(request), Refusal::OtherNode, "{request:?}");
    }
    let written = stranger.write(extent, &[0], &[page(666)]);
    assert_eq!(written, Outcome::Refused(Refusal::OtherNode));
}

#[test]
fn another_node_that_knows_a_spaces_id_is_refused() {
    let pki = Pki::new();
    let (donor, serving) = pki.lend("one");
    let at = serving.address();
    // Connecting alone does not make a node the owner.
    let mut early = pki.connect("b", at);
    // Admitting itself before there is an owner does not make it a reader.
    early.done(Request::Admit { node: "b" });
    let mut own = pki.own(at);
    let extent = own.allocate(0, ORDER);
    assert_eq!(own.write(extent, &[3], &[page(3)]), Outcome::Done);

    assert_powerless(&mut early, extent);
    let reads = Request::Read { extent, pages: &[3] };
    assert_eq!(early.refused(reads), Refusal::OtherNode);
    pki.assert_stranger("b", at);
    pki.assert_stranger("one", at);
    let counted = donor.snapshot();
    assert_eq!(counted.counters.refusals.other_node, 20);
    let lease_ms = LONG_LEASE.as_millis() as u64;
    assert_eq!(counted.spaces[0].lease_ms, lease_ms, "no stranger shortens it");
    assert_eq!(own.pages(extent, &[3]), [page(3)]);
    // Ownership goes by the node's name: each connection here has a new certificate.
    let mut again = pki.own(at);
    assert_eq!(again.pages(extent, &[3]), [page(3)]);
    assert_eq!(again.allocate(1, ORDER), ExtentId(extent.0 + 1));
    // The owner of one space does not own the extents of another space.
    let mut other = pki.borrow("b", at, &hello(SPACE + 1, 1, LONG_LEASE));
    let others = other.allocate(0, ORDER);
    assert_eq!(again.refused(Request::Free { extent: others }), Refusal::NoSuchExtent);
}

#[test]
fn a_successor_on_the_same_node_takes_over() {
    let pki = Pki::new();
    let (_donor, serving) = pki.lend("one");
    let at = serving.address();
    let mut first = pki.own(at);
    let extent = first.allocate(0, ORDER);
    assert_eq!(first.write(extent, &[3], &[page(3)]), Outcome::Done);
    let mut second = pki.borrow("a", at, &hello(SPACE, 2, LONG_LEASE));
    assert_eq!(second.pages(extent, &[3]), [page(3)]);
    assert!(matches!(first.refused(Request::Renew), Refusal::StaleEpoch(_)));
    pki.assert_stranger("b", at);
    second.done(Request::FreeAll);
}

#[test]
fn a_space_passes_to_the_node_that_its_owner_names() {
    let pki = Pki::new();
    let lent = pki.lend("one");
    let at = lent.1.address();
    let mut own = pki.own(at);
    let extent = own.allocate(0, ORDER);
    assert_eq!(own.write(extent, &[3], &[page(3)]), Outcome::Done);
    own.done(Request::Bequeath { node: "b" });
    pki.assert_stranger("c", at);
    // The epoch is the owner's: a successor with the same epoch does not get the space.
    let mut early = pki.connect("b", at);
    for request in [Request::Fence, Request::FreeAll, Request::Bequeath { node: "c" }] {
        assert_eq!(early.refused(request), Refusal::OtherNode, "{request:?}");
    }
    assert_eq!(own.write(extent, &[4], &[page(4)]), Outcome::Done, "it is the owner's until then");

    let mut heir = pki.borrow("b", at, &hello(SPACE, 2, LONG_LEASE));
    assert_eq!(heir.pages(extent, &[3, 4]), [page(3), page(4)]);
    assert_eq!(heir.write(extent, &[3], &[page(33)]), Outcome::Done);
    // The donor refuses all that the previous owner still sends.
    assert_eq!(own.write(extent, &[3], &[page(5)]), Outcome::Refused(Refusal::OtherNode));
    for request in [Request::FreeAll, Request::Renew, Request::Bequeath { node: "a" }] {
        assert_eq!(own.refused(request), Refusal::OtherNode, "{request:?}");
    }
    pki.assert_stranger("a", at);
    assert_eq!(heir.pages(extent, &[3]), [page(33)]);
    drop((own, early, heir));

    let (_donor, serving) = pki.replace("one", lent);
    pki.assert_stranger("a", serving.address());
    let mut heir = pki.borrow("b", serving.address(), &hello(SPACE, 3, LONG_LEASE));
    assert_eq!(heir.pages(extent, &[3]), [page(33)]);
    heir.done(Request::FreeAll);
}

#[test]
fn the_owner_is_known_to_the_next_process() {
    let pki = Pki::new();
    let lent = pki.lend("one");
    let mut own = pki.own(lent.1.address());
    let extent = own.allocate(0, ORDER);
    assert_eq!(own.write(extent, &[3], &[page(3)]), Outcome::Done);
    own.done(Request::Admit { node: "two" });
    drop(own);

    let (_donor, serving) = pki.replace("one", lent);
    pki.assert_stranger("b", serving.address());
    pki.assert_stranger("two", serving.address());
    let mut own = pki.own(serving.address());
    assert_eq!(own.pages(extent, &[3]), [page(3)]);
    own.done(Request::FreeAll);
}

#[test]
fn what_is_nobodys_in_a_ledger_is_whose_borrower_is_back() {
    let pki = Pki::new();
    let plain = DonorConfig { tls_dir: None, ..pki.config("one") };
    let donor = Donor::open(&plain, None).unwrap();
    let serving = donor.serve(listen(plain.listen).unwrap()).unwrap();
    let mut own = Borrower::connect(serving.address(), SPACE, 1);
    own.done(Request::Fence);
    let extent = own.allocate(0, ORDER);
    assert_eq!(own.write(extent, &[3], &[page(3)]), Outcome::Done);
    drop(own);

    let lent = pki.replace("one", (donor, serving));
    let mut early = pki.connect("b", lent.1.address());
    let mut own = pki.own(lent.1.address());
    assert_eq!(own.pages(extent, &[3]), [page(3)]);
    assert_powerless(&mut early, extent);
    pki.assert_stranger("b", lent.1.address());
    drop((own, early));
    let (_donor, serving) = pki.replace("one", lent);
    pki.assert_stranger("b", serving.address());
    assert_eq!(pki.own(serving.address()).pages(extent, &[3]), [page(3)]);
}

#[test]
fn a_donor_copies_from_another_one_once_the_owner_has_admitted_it() {
    let pki = Pki::new();
    let (_one_memory, one) = pki.lend("one");
    let (_two_memory, two) = pki.lend("two");
    let (mut at_one, mut at_two) = (pki.own(one.address()), pki.own(two.address()));
    let from = at_one.allocate(0, ORDER);
    assert_eq!(at_one.write(from, &[3, 4], &[page(3), page(4)]), Outcome::Done);
    let fill = to_fill(&mut at_two, (one.address(), &at_one, from));
    assert_eq!(at_two.refused(fill), Refusal::NoSource, "nobody has let it");
    at_one.done(Request::Admit { node: "two" });
    at_two.done(fill);
    let Request::Fill { extent: to, .. } = fill else { unreachable!() };
    assert_eq!(at_two.pages(to, &[3, 4]), [page(3), page(4)]);
    // The admitted donor may read, and nothing else.
    let mut reader = pki.connect("two", one.address());
    assert_eq!(reader.pages(from, &[3]), [page(3)]);
    assert_powerless(&mut reader, from);
    pki.assert_stranger("three", one.address());
    // The owner is not limited to reads: it may still free all extents.
    pki.own(one.address()).done(Request::FreeAll);
}

#[test]
fn a_borrower_that_knows_no_owners_has_copies_made_and_its_successor_admits() {
    let pki = Pki::new();
    let (_one_memory, one) = pki.lend("one");
    let (_two_memory, two) = pki.lend("two");
    let at = one.address();
    let mut at_one = pki.borrow("a", at, &earlier(1));
    let mut at_two = pki.borrow("a", two.address(), &earlier(1));
    let from = at_one.allocate(0, ORDER);
    assert_eq!(at_one.write(from, &[3], &[page(3)]), Outcome::Done);
    let fill = to_fill(&mut at_two, (at, &at_one, from));
    at_two.done(fill);
    // For its copies every node may read, and do nothing else.
    let mut reader = pki.connect("b", at);
    assert_eq!(reader.pages(from, &[3]), [page(3)]);
    assert_powerless(&mut reader, from);
    let mut old_reader = pki.open("b", at, &earlier(1)).unwrap();
    assert_eq!(old_reader.refused(Request::FreeAll), Refusal::Busy, "it knows no other word");
    let mut successor = pki.borrow("a", at, &hello(SPACE, 2, LONG_LEASE));
    pki.assert_stranger("b", at);
    let reads = Request::Read { extent: from, pages: &[3] };
    assert_eq!(reader.refused(reads), Refusal::OtherNode);
    assert_eq!(successor.pages(from, &[3]), [page(3)]);
}
