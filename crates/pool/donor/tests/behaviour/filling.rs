//! An extent is filled from another donor's while its borrower goes on writing to it.

use crate::common::{Borrower, start};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::{FillSource, Refusal, Request};
use std::net::SocketAddr;

const ORDER: u8 = 10;
const PAGES: u32 = 1 << ORDER;

fn page(fill: u8) -> [u8; PAGE_SIZE] {
    [fill; PAGE_SIZE]
}

fn allocate(borrower: &mut Borrower, segment: u64, generation: Generation) -> ExtentId {
    let request = Request::Allocate { segment, member: 0, order: ORDER, generation };
    match borrower.call(request) {
        Outcome::Allocated(extent) => extent,
        other => panic!("no extent but {other:?}"),
    }
}

fn line(borrower: &mut Borrower) -> (Generation, u32) {
    let Outcome::Held(lines) = borrower.call(Request::List { from: ExtentId(0) }) else {
        panic!("no list");
    };
    (lines[0].generation, lines[0].written)
}

fn source(address: SocketAddr, borrower: &Borrower, extent: ExtentId) -> FillSource {
    FillSource { address, boot: borrower.welcome().boot, extent }
}

#[test]
fn a_fill_brings_what_is_missing_and_nothing_that_is_older() {
    let (_old_memory, old) = start(2048);
    let (_new_memory, new) = start(2048);
    let mut at_old = Borrower::connect(old.address(), 7, 1);
    let mut at_new = Borrower::connect(new.address(), 7, 1);
    let from = allocate(&mut at_old, 3, Generation(5));
    for first in (0..PAGES).step_by(256) {
        let pages: Vec<u32> = (first..first + 256).filter(|page| page % 7 != 0).collect();
        let data: Vec<_> = pages.iter().map(|at| page(1 + (at % 200) as u8)).collect();
        assert_eq!(at_old.write(from, &pages, &data), Outcome::Done);
    }
    let to = allocate(&mut at_new, 3, Generation::FILLING);
    // Newer than what the other has: a page that was written here, and one that was discarded.
    assert_eq!(at_new.write(to, &[11, 12], &[page(251), page(252)]), Outcome::Done);
    at_new.done(Request::Discard { extent: to, generation: Generation(1), first: 12, count: 2 });
    assert_eq!(line(&mut at_new), (Generation::FILLING, 1), "a write does not make it whole");

    let source = source(old.address(), &at_old, from);
    for first in (0..PAGES).step_by(512) {
        at_new.done(Request::Fill { extent: to, first, count: 512, source });
    }
    at_new.done(Request::Confirm { extent: to, generation: Generation(6) });
    let written = PAGES - PAGES.div_ceil(7);
    assert_eq!(line(&mut at_new), (Generation(6), written - 2), "zeros are not stored");
    for first in (0..PAGES).step_by(256) {
        let pages: Vec<u32> = (first..first + 256).collect();
        for (at, (data, is_right)) in pages.iter().zip(at_new.read(to, &pages).unwrap()) {
            let expected = match at {
                11 => 251,
                12 | 13 => 0,
                at if at % 7 == 0 => 0,
                at => 1 + (at % 200) as u8,
            };
            assert!(is_right && data == page(expected), "page {at}");
        }
    }
    let again = Request::Fill { extent: to, first: 0, count: 1, source };
    assert_eq!(at_new.refused(again), Refusal::NotFilling, "it is whole");
}

#[test]
fn a_fill_from_nowhere_is_refused_and_may_be_tried_again() {
    let (_old_memory, old) = start(2048);
    let (_new_memory, new) = start(2048);
    let mut at_old = Borrower::connect(old.address(), 7, 1);
    let mut at_new = Borrower::connect(new.address(), 7, 1);
    let from = allocate(&mut at_old, 0, Generation(1));
    assert_eq!(at_old.write(from, &[5], &[page(9)]), Outcome::Done);
    let to = allocate(&mut at_new, 0, Generation::FILLING);
    let good = source(old.address(), &at_old, from);
    let nobody = FillSource { address: ([127, 0, 0, 1], 1).into(), ..good };
    let other_life = FillSource { boot: good.boot + 1, ..good };
    let other_extent = FillSource { extent: ExtentId(99), ..good };
    for source in [nobody, other_life, other_extent] {
        let request = Request::Fill { extent: to, first: 0, count: 16, source };
        assert_eq!(at_new.refused(request), Refusal::NoSource, "{source:?}");
    }
    at_new.done(Request::Fill { extent: to, first: 0, count: 16, source: good });
    assert_eq!(at_new.read(to, &[5]).unwrap()[0], (page(9), true));
}

#[test]
fn a_borrower_that_was_replaced_fills_nothing() {
    let (_old_memory, old) = start(2048);
    let (_new_memory, new) = start(2048);
    let mut at_old = Borrower::connect(old.address(), 7, 1);
    let mut at_new = Borrower::connect(new.address(), 7, 1);
    let from = allocate(&mut at_old, 0, Generation(1));
    assert_eq!(at_old.write(from, &[0], &[page(1)]), Outcome::Done);
    let to = allocate(&mut at_new, 0, Generation::FILLING);
    let source = source(old.address(), &at_old, from);
    let request = Request::Fill { extent: to, first: 0, count: 1, source };
    let mut successor = Borrower::connect(old.address(), 7, 2);
    successor.done(Request::Fence);
    assert_eq!(at_new.refused(request), Refusal::NoSource, "fenced at the source");
    Borrower::connect(new.address(), 7, 2).done(Request::Fence);
    let request = Request::Confirm { extent: to, generation: Generation(9) };
    assert!(matches!(at_new.refused(request), Refusal::StaleEpoch(_)));
}

#[test]
fn a_draining_donor_lends_nothing_and_says_so_and_serves_what_it_has() {
    let (memory, donor) = start(2048);
    let mut borrower = Borrower::connect(donor.address(), 7, 1);
    let extent = allocate(&mut borrower, 0, Generation(1));
    memory.set_draining(true);
    let request =
        Request::Allocate { segment: 1, member: 0, order: ORDER, generation: Generation(1) };
    assert_eq!(borrower.refused(request), Refusal::Full);
    assert!(borrower.load().draining && borrower.load().free_pages == 0);
    assert_eq!(allocate(&mut borrower, 0, Generation(1)), extent, "what is held is named");
    assert_eq!(borrower.write(extent, &[1], &[page(3)]), Outcome::Done);
    memory.set_draining(false);
    allocate(&mut borrower, 1, Generation(1));
    assert!(!borrower.load().draining);
}
