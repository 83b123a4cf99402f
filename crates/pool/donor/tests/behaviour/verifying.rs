//! A donor looks whether its pages still are what was stored, and mends them from another one.

use crate::common::{Borrower, Page, page, start};
use hecaton_donor::{Donor, Serving};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, page_sum};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::PageState::{self, Damaged, Sound, Unwritten};
use hecaton_transport::protocol::{FillSource, Refusal, Request};
use std::fs::File;
use std::os::unix::fs::FileExt;

const ORDER: u8 = 6;
const PAGES: u32 = 1 << ORDER;

struct Lent {
    donor: Donor,
    serving: Serving,
    borrower: Borrower,
    extent: ExtentId,
}

impl Lent {
    fn start() -> Lent {
        let (donor, serving) = start(1024);
        let mut borrower = Borrower::connect(serving.address(), 7, 1);
        let extent = borrower.allocate(3, ORDER);
        Lent { donor, serving, borrower, extent }
    }

    fn write(&mut self, at: u32, data: Page) {
        assert_eq!(self.borrower.write(self.extent, &[at], &[data]), Outcome::Done);
    }

    fn states(&mut self, first: u32, count: u32) -> Vec<PageState> {
        match self.borrower.call(Request::Verify { extent: self.extent, first, count }) {
            Outcome::Verified(states) => states,
            other => panic!("not verified but {other:?}"),
        }
    }

    /// A bit of a page flips in the donor's memory.
    fn damage(&self, data: &Page) {
        let memory = File::from(self.donor.fds().unwrap().arena);
        let mut found = [0; PAGE_SIZE];
        for at in (0..1024).map(|page| page * PAGE_SIZE as u64) {
            memory.read_exact_at(&mut found, at).unwrap();
            if found == *data {
                return memory.write_all_at(&[found[99] ^ 4], at + 99).unwrap();
            }
        }
        panic!("the page is not there");
    }

    fn source(&self) -> FillSource {
        let boot = self.borrower.welcome().boot;
        FillSource { address: self.serving.address(), boot, extent: self.extent }
    }

    fn repair_from(&self, first: u32, count: u32, source: FillSource) -> Request<'static> {
        Request::Repair { extent: self.extent, first, count, source }
    }
}

#[test]
fn each_page_is_sound_damaged_or_unwritten() {
    let mut lent = Lent::start();
    for at in [0, 5, PAGES - 1] {
        lent.write(at, page(u64::from(at)));
    }
    lent.damage(&page(5));
    let sum = |number| page_sum(&page(number));
    let mut expected = [Unwritten; PAGES as usize];
    expected[0] = Sound(sum(0));
    expected[5] = Damaged(sum(5));
    expected[PAGES as usize - 1] = Sound(sum(u64::from(PAGES) - 1));
    assert_eq!(lent.states(0, PAGES), expected);
    assert_eq!(lent.states(5, 2), expected[5..7]);
    lent.write(5, page(6));
    assert_eq!(lent.states(5, 1), [Sound(sum(6))], "a write makes it good");

    let beyond = Request::Verify { extent: lent.extent, first: PAGES - 1, count: 2 };
    assert_eq!(lent.borrower.refused(beyond), Refusal::OutOfBounds);
    let other = Request::Verify { extent: ExtentId(99), first: 0, count: 1 };
    assert_eq!(lent.borrower.refused(other), Refusal::NoSuchExtent);
    let counters = lent.donor.snapshot().counters;
    assert_eq!((counters.pages_verified, counters.pages_damaged), (u64::from(PAGES) + 3, 2));
}

#[test]
fn a_damaged_page_is_mended_from_the_same_contents_and_from_nothing_else() {
    let (mut here, mut there) = (Lent::start(), Lent::start());
    for lent in [&mut here, &mut there] {
        (0..8).for_each(|at| lent.write(at, page(at.into())));
    }
    // Another version of page 2 is there, and page 3 is damaged there, too.
    there.write(2, page(77));
    there.damage(&page(3));
    (1..4).for_each(|at| here.damage(&page(at)));
    here.borrower.done(here.repair_from(0, 8, there.source()));
    let states = here.states(0, 8);
    let is_sound = |state: &PageState| matches!(state, Sound(_));
    let sound: Vec<bool> = states.iter().map(is_sound).collect();
    assert_eq!(sound, [true, true, false, false, true, true, true, true]);
    let read = here.borrower.read(here.extent, &[1]).unwrap();
    assert_eq!(read, [(page(1), true)]);
    // A sound page is not overwritten, whatever the other donor has.
    here.write(2, page(78));
    here.borrower.done(here.repair_from(2, 1, there.source()));
    assert_eq!(here.borrower.pages(here.extent, &[2]), [page(78)]);
    assert_eq!(here.donor.snapshot().counters.pages_repaired, 1);

    let nobody = FillSource { address: ([127, 0, 0, 1], 1).into(), ..there.source() };
    assert_eq!(here.borrower.refused(here.repair_from(3, 1, nobody)), Refusal::NoSource);
    // A borrower that was replaced has nothing mended.
    let mut successor = Borrower::connect(there.serving.address(), 7, 2);
    successor.done(Request::Fence);
    let request = here.repair_from(3, 1, there.source());
    assert_eq!(here.borrower.refused(request), Refusal::NoSource);
}

#[test]
fn a_page_that_has_gone_bad_and_reads_as_zeros_is_not_copied_as_zeros() {
    let mut there = Lent::start();
    there.write(4, page(4));
    let memory = File::from(there.donor.fds().unwrap().arena);
    for at in (0..1024).map(|page| page * PAGE_SIZE as u64) {
        memory.write_all_at(&[0; PAGE_SIZE], at).unwrap();
    }
    let (_donor, serving) = start(1024);
    let mut borrower = Borrower::connect(serving.address(), 7, 1);
    let request =
        Request::Allocate { segment: 3, member: 0, order: ORDER, generation: Generation::FILLING };
    let Outcome::Allocated(extent) = borrower.call(request) else { panic!("no extent") };
    borrower.done(Request::Fill { extent, first: 0, count: PAGES, source: there.source() });
    let read = borrower.read(extent, &[3, 4]).unwrap();
    assert_eq!(read, [([0; PAGE_SIZE], true), ([0; PAGE_SIZE], false)]);
}
