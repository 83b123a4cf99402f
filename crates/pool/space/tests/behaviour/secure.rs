//! A space whose connections are protected: pages go to donors of the nodes that the directory
//! names, by way of TLS, and so do copies from donor to donor.

use crate::common::*;
use hecaton_memory::{Epoch, Generation, Size, page_sum};
use hecaton_pki::Role;
use hecaton_pki::testing::TestAuthority;
use hecaton_space::{DonorStatus, Expected, Heritage, Redundancy, Space, SpaceConfig};
use hecaton_testkit::wait_until_seen;
use hecaton_transport::client::{Connection, Options, Outcome as Answer};
use hecaton_transport::protocol::{Hello, Request, VERSIONS};
use hecaton_transport::tls::{Destination, Tls};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const SEGMENTS: u64 = 4;

struct Pki(TestAuthority);

impl Pki {
    fn new() -> Pki {
        Pki(TestAuthority::in_scratch())
    }

    /// A donor of the node of that name.
    fn lend(&self, name: &str) -> Lent {
        Lent::start_secure(name, 16, self.0.issue(name, Role::Node))
    }

    fn config(&self, redundancy: Redundancy) -> SpaceConfig {
        let credentials = Some(self.0.credentials("borrower", Role::Node));
        SpaceConfig { redundancy, credentials, ..config(SEGMENTS * SEGMENT_PAGES) }
    }

    /// A space with two copies.
    fn owned(&self) -> SpaceConfig {
        self.config(Redundancy::Mirror(2))
    }

    /// The same one, for the node that it goes to.
    fn inherited(&self) -> SpaceConfig {
        let credentials = Some(self.0.credentials("heir", Role::Node));
        SpaceConfig { credentials, epoch: Epoch(2), ..self.owned() }
    }
}

/// Stored segments of such a space.
fn expected() -> BTreeMap<u64, Expected> {
    let generation = Generation::first(Epoch(1));
    (0..SEGMENTS).map(|segment| (segment, Expected { pages: 1, generation })).collect()
}

/// The pages of each segment.
fn segments() -> Vec<Vec<u64>> {
    let pages = |segment| segment * SEGMENT_PAGES..(segment + 1) * SEGMENT_PAGES;
    (0..SEGMENTS).map(|segment| pages(segment).collect()).collect()
}

#[test]
fn pages_are_stored_and_copied_from_donor_to_donor() {
    let pki = Pki::new();
    let mut donors = ["a", "b", "c"].map(|name| pki.lend(name));
    let known = cluster(&donors.each_ref());
    let space = Space::create(pki.config(Redundancy::Mirror(2)), known).unwrap();
    let mut lane = space.lane().unwrap();
    for pages in segments() {
        assert_written(&mut lane, &pages, 1);
        assert_reads(&mut lane, &pages, 1);
    }
    // The copies of this donor are made anew between the two that are left.
    donors[0].stop();
    segments().iter().for_each(|pages| write_until_stored(&mut lane, &pages[..10], 2));
    tend_until(&space, "whole again", is_whole);
    assert!(space.status().bytes_filled > 0);
    for pages in segments() {
        assert_reads(&mut lane, &pages[..10], 2);
        assert_reads(&mut lane, &pages[10..], 1);
    }
    let _ = space.release();
    donors[1].assert_all_comes_back();
    donors[2].assert_all_comes_back();
}

/// A copy that a donor mends with another's, and one that it takes over from another, belong to the
/// space's node.
#[test]
fn donors_mend_and_empty_each_other() {
    let pki = Pki::new();
    let donors = ["a", "b", "c"].map(|name| pki.lend(name));
    donors[2].donor.set_limit(Some(Size(0)));
    let known = cluster(&donors.each_ref());
    let space = Space::create(pki.config(Redundancy::Mirror(2)), known).unwrap();
    let mut lane = space.lane().unwrap();
    let pages: Vec<u64> = segments().iter().map(|pages| pages[0]).collect();
    pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
    damage(&donors[0], &pages[..2], 1);
    damage(&donors[1], &pages[2..3], 1);
    let status =
        scrub_once(&space, &|page| pages.contains(&page).then(|| page_sum(&content(page, 1))));
    assert_eq!((status.pages_repaired, status.pages_lost), (3, 0));
    donors[2].donor.set_limit(None);
    donors[0].donor.set_draining(true);
    tend_until(&space, "empty", |space| {
        space.renew();
        let is_empty = |donor: &DonorStatus| donor.name != donors[0].name || donor.extents == 0;
        space.status().donors.iter().all(is_empty) && is_whole(space)
    });
    pages.iter().for_each(|page| assert_reads(&mut lane, &[*page], 1));
    let _ = space.release();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn a_donor_at_which_another_node_was_first_is_passed_over() {
    let pki = Pki::new();
    let donors = ["a", "b"].map(|name| pki.lend(name));
    let config = pki.config(Redundancy::None);
    let hello = Hello {
        versions: VERSIONS,
        space: config.id,
        epoch: Epoch(1),
        lane: 99,
        lease: Duration::from_secs(30),
        consumer: "squatter".to_owned(),
    };
    let credentials = pki.0.credentials("squatter", Role::Node);
    let tls = Some(Tls { credentials, node: None });
    let to = Destination { address: donors[0].address(), tls };
    let mut squatter = Connection::open(to, &hello, &Options::default()).unwrap();
    assert_eq!(squatter.call(Request::Fence, &[]).unwrap(), Answer::Done);
    let space = Space::create(config, cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    for pages in segments() {
        assert_written(&mut lane, &pages, 1);
        assert_reads(&mut lane, &pages, 1);
    }
    assert!(donors[0].is_all_free() && !donors[1].is_all_free());
}

/// Extents at a donor that is away are still the first owner's: that donor may know no heir.
#[test]
fn a_space_is_passing_while_one_donor_may_hold_it_for_its_owner() {
    let pki = Pki::new();
    let mut donors = ["a", "b"].map(|name| pki.lend(name));
    let space = Space::create(pki.owned(), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    segments().iter().for_each(|pages| assert_written(&mut lane, pages, 1));
    assert_eq!(space.bequeath("heir").unwrap(), Heritage::Own);
    let _heir = Space::adopt(pki.inherited(), cluster(&[&donors[0]]), &expected()).unwrap();
    assert_eq!(space.bequeath("heir").unwrap(), Heritage::Passing);
    donors[1].stop();
    assert_eq!(space.bequeath("heir").unwrap(), Heritage::Passing);
}

/// Neither does a process of the owner that is started again take it for its own, nor one of a
/// donor that has nothing of it and knows no heir.
#[test]
fn a_space_has_passed_whoever_has_nothing_of_it() {
    let pki = Pki::new();
    let donors = ["a", "b"].map(|name| pki.lend(name));
    let space = Space::create(pki.owned(), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    segments().iter().for_each(|pages| assert_written(&mut lane, pages, 1));
    space.bequeath("heir").unwrap();
    let _heir = Space::adopt(pki.inherited(), cluster(&donors.each_ref()), &expected()).unwrap();
    // With copies, the heir begins before the last donor has heard of it.
    wait_until_seen("the space has passed", || match space.bequeath("heir").unwrap() {
        Heritage::Passed => Ok(()),
        heritage => Err(format!("{heritage:?}")),
    });
    let late = pki.lend("late");
    let known = cluster(&[&donors[0], &donors[1], &late]);
    match Space::adopt(pki.owned(), known, &expected()) {
        Ok(again) => assert_eq!(again.bequeath("heir").unwrap(), Heritage::Passed),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn neither_end_takes_who_is_not_whom_it_should_be() {
    let pki = Pki::new();
    let donor = pki.lend("a");
    const LONGEST: Duration = Duration::from_secs(3);
    let short = |config: SpaceConfig| SpaceConfig {
        patience: Duration::from_millis(300),
        give_up: Duration::from_millis(300),
        connection: Options { connect: LONGEST, answer: LONGEST, ..config.connection },
        ..config
    };
    // A borrower without a certificate.
    let plain = short(config(SEGMENTS * SEGMENT_PAGES));
    let written = Space::create(plain, cluster(&[&donor]))
        .and_then(|space| space.lane())
        .map(|mut lane| write(&mut lane, &[1], 1));
    assert!(!matches!(written, Ok(Outcome::Written)), "without a certificate");
    // A donor of another node than the directory says.
    let known = Known::default();
    known.set("b", donor.address());
    let secure = short(pki.config(Redundancy::None));
    let written = Space::create(secure, Arc::new(known))
        .and_then(|space| space.lane())
        .map(|mut lane| write(&mut lane, &[1], 1));
    assert!(!matches!(written, Ok(Outcome::Written)), "node a was taken for node b");
    assert!(donor.is_all_free());
}
