//! Donors that want a part of their memory back, on real sockets: who reads and writes does not
//! notice.

use crate::common::*;
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_space::{Redundancy, Space, SpaceConfig};
use hecaton_transport::client::{Connection, Options};
use hecaton_transport::protocol::{Hello, Request, VERSIONS};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SEGMENTS: u64 = 6;

fn space_of(copies: u8, donors: &[&Lent]) -> Arc<Space> {
    let redundancy = Redundancy::of_copies(copies).unwrap();
    let config = SpaceConfig { redundancy, ..config(SEGMENTS * SEGMENT_PAGES) };
    Space::create(config, cluster(donors)).unwrap()
}

fn a_page_of_each_segment() -> impl Iterator<Item = u64> {
    (0..SEGMENTS).map(|segment| segment * SEGMENT_PAGES + segment)
}

fn limit(donor: &Lent, segments: u64) {
    donor.donor.set_limit(Some(Size(segments * SEGMENT_PAGES * PAGE_SIZE as u64)));
}

/// Segments of which the donor has extents.
fn lent(donor: &Lent) -> u64 {
    donor.donor.snapshot().lent_pages / SEGMENT_PAGES
}

#[test]
fn a_donor_gets_back_what_it_wants_while_its_pages_are_written_and_read() {
    for copies in [1, 2] {
        let donors = ["a", "b", "c"].map(|name| Lent::start(name, 32));
        let space = space_of(copies, &donors.each_ref());
        let mut lane = space.lane().unwrap();
        for page in a_page_of_each_segment() {
            assert_written(&mut lane, &[page, page + 1], 0);
        }
        assert!(lent(&donors[0]) > 1);
        limit(&donors[0], 1);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let tending = scope.spawn(|| {
                tend_until(&space, "back", |space| lent(&donors[0]) == 1 && is_whole(space));
                done.store(true, Ordering::Release);
            });
            let mut turn = 1;
            while !done.load(Ordering::Acquire) && !tending.is_finished() {
                for page in a_page_of_each_segment() {
                    write_until_stored(&mut lane, &[page], turn);
                    assert_reads(&mut lane, &[page], turn);
                    assert_reads(&mut lane, &[page + 1], 0);
                }
                turn += 1;
            }
            tending.join().unwrap();
            for page in a_page_of_each_segment() {
                assert_reads(&mut lane, &[page], turn - 1);
                assert_reads(&mut lane, &[page + 1], 0);
            }
        });
        let snapshot = donors[0].donor.snapshot();
        assert_eq!((snapshot.recalled_pages, snapshot.lendable_pages), (0, 0));
        space.release().unwrap();
        donors.iter().for_each(Lent::assert_all_comes_back);
    }
}

#[test]
fn it_is_heard_with_the_next_page() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 32));
    let space = space_of(1, &donors.each_ref());
    let mut lane = space.lane().unwrap();
    let pages: Vec<u64> = a_page_of_each_segment().collect();
    pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
    assert!(!space.tend(Duration::from_secs(1), u64::MAX));
    limit(&donors[0], 0);
    pages.iter().for_each(|page| assert_reads(&mut lane, &[*page], 1));
    // Without a renewal, which would tell too.
    while lent(&donors[0]) > 0 {
        assert!(space.tend(Duration::from_secs(1), u64::MAX), "{:?}", space.status());
    }
    pages.iter().for_each(|page| assert_reads(&mut lane, &[*page], 1));
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn with_room_nowhere_the_second_copy_goes_until_there_is_room_again() {
    let donors = ["a", "b"].map(|name| Lent::start(name, SEGMENTS));
    let space = space_of(2, &donors.each_ref());
    let mut lane = space.lane().unwrap();
    for page in a_page_of_each_segment() {
        assert_written(&mut lane, &[page], 1);
    }
    limit(&donors[0], 2);
    tend_until(&space, "back", |_| lent(&donors[0]) == 2);
    assert_eq!(space.status().segments_degraded, SEGMENTS - 2);
    // The other has the only copies of what went, and keeps them.
    limit(&donors[1], 0);
    tend_until(&space, "back as far as it can be", |_| lent(&donors[1]) == SEGMENTS - 2);
    for page in a_page_of_each_segment() {
        assert_reads(&mut lane, &[page], 1);
        write_until_stored(&mut lane, &[page], 2);
    }
    donors.iter().for_each(|donor| donor.donor.set_limit(None));
    tend_until(&space, "whole again", is_whole);
    for page in a_page_of_each_segment() {
        assert_reads(&mut lane, &[page], 2);
    }
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

/// As when the donor was away for longer than the lease, and nobody has wanted a page of it since.
#[test]
fn a_copy_is_given_up_only_for_one_that_is_there() {
    let donors = ["a", "b"].map(|name| Lent::start(name, SEGMENTS));
    let space = space_of(2, &donors.each_ref());
    let mut lane = space.lane().unwrap();
    let pages: Vec<u64> = a_page_of_each_segment().collect();
    pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
    let SpaceConfig { id, epoch, lease, .. } = *space.config();
    let consumer = "behind its back".to_owned();
    let hello = Hello { versions: VERSIONS, space: id, epoch, lane: 1, lease, consumer };
    let other = Connection::open(donors[1].address(), &hello, &Options::default());
    other.unwrap().call(Request::FreeAll, &[]).unwrap();
    limit(&donors[0], 0);
    tend_until(&space, "back", |_| lent(&donors[0]) == 0);
    pages.iter().for_each(|page| assert_reads(&mut lane, &[*page], 1));
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn the_only_copy_stays_until_somebody_has_room_for_it() {
    let donors = ["a", "b"].map(|name| Lent::start(name, SEGMENTS));
    let known = cluster(&[&donors[0]]);
    let space = Space::create(config(SEGMENTS * SEGMENT_PAGES), known.clone()).unwrap();
    let mut lane = space.lane().unwrap();
    for page in a_page_of_each_segment() {
        assert_written(&mut lane, &[page], 1);
    }
    limit(&donors[0], 1);
    let is_asked = |space: &Space| space.status().segments_untended == SEGMENTS - 1;
    tend_until(&space, "asked for", is_asked);
    assert_eq!(lent(&donors[0]), SEGMENTS);
    known.set("b", donors[1].address());
    tend_until(&space, "back", |_| lent(&donors[0]) == 1);
    for page in a_page_of_each_segment() {
        assert_reads(&mut lane, &[page], 1);
    }
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}
