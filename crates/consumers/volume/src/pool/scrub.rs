//! Tells the scrub which sum the copies of each page must have.

use crate::spilling::places::Place;
use crate::state::{Page, SEGMENT_PAGES, sum_of};
use crate::volume::Volume;
use hecaton_memory::{PageNo, PageSum};

/// Scrubs as long as the volume is served. All donors together read so many bytes a second for it.
pub(crate) fn run(volume: &Volume, bytes_per_s: u64) {
    let known = |page| stored(volume, page);
    volume.space.keep_scrubbed(&known, bytes_per_s, &|| volume.is_over());
}

/// Sum of a page that donors store; `None` if it is not certain, or a write is in flight.
///
/// The check for writes comes first. A write that it misses has ended, and has set the page's word.
/// Or the write has yet to begin, after all that was asked of donors before this call.
fn stored(volume: &Volume, page: PageNo) -> Option<PageSum> {
    if volume.is_being_written(page) {
        return None;
    }
    let places = volume.places.as_ref();
    if places.is_some_and(|places| places.get(page / SEGMENT_PAGES) != Place::Pool) {
        return None;
    }
    match volume.state.page(page) {
        Page::Data(word) => sum_of(word),
        Page::Hole | Page::Lost => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::volume::tests::{World, read};
    use hecaton_memory::PAGE_SIZE;
    use hecaton_space::ScrubStatus;
    use hecaton_testkit::wait_until;
    use std::thread;

    const PAGES: u64 = 64;

    fn of(volume: &crate::Volume) -> ScrubStatus {
        volume.stats(0).pool.scrub
    }

    #[test]
    fn what_goes_bad_unread_is_mended() {
        for encrypt in [false, true] {
            let mut world = World::new(2, 2, PAGES).scrubbing(1 << 30).encrypting(encrypt);
            let volume = world.volume();
            let contents = [0x5a; PAGES as usize * PAGE_SIZE];
            volume.write(0, &contents).unwrap();
            assert_eq!(world.each_page_of(0, |_, page| page[7] = !page[7]), PAGES);
            wait_until("it is mended", || of(&volume).pages_repaired == PAGES);
            assert_eq!((of(&volume).pages_lost, of(&volume).copies_given_up), (0, 0));
            world.stop(1);
            assert_eq!(read(&volume, 0, contents.len()), contents);
        }
    }

    #[test]
    fn what_came_back_wrong_is_mended_without_a_scrub() {
        for encrypt in [false, true] {
            let world = World::new(2, 2, PAGES).encrypting(encrypt);
            let volume = world.volume();
            let contents = [0x5a; PAGES as usize * PAGE_SIZE];
            volume.write(0, &contents).unwrap();
            // Damages half of the pages at each donor: reads from either donor meet damage.
            for donor in 0..2 {
                world.each_page_of(donor, |at, page| {
                    if at % 2 == donor as u64 {
                        page[7] = !page[7];
                    }
                });
            }
            assert_eq!(of(&volume).pages_repaired, 0);
            assert_eq!(read(&volume, 0, contents.len()), contents);
            wait_until("it is mended", || of(&volume).pages_repaired == PAGES);
        }
    }

    #[test]
    fn what_is_being_written_is_no_damage() {
        const WRITERS: u64 = 4;
        for buffer in [None, Some(256 << 10)] {
            let world = World::new(2, 2, PAGES).scrubbing(u64::MAX);
            let world = match buffer {
                Some(bytes) => world.buffering(bytes),
                None => world,
            };
            let volume = world.volume();
            let round = |turn: u64| {
                thread::scope(|scope| {
                    for writer in 0..WRITERS {
                        let volume = &volume;
                        scope.spawn(move || {
                            for page in (writer..PAGES).step_by(WRITERS as usize) {
                                let contents = [(turn + page) as u8; PAGE_SIZE];
                                volume.write(page * PAGE_SIZE as u64, &contents).unwrap();
                            }
                        });
                    }
                });
            };
            let mut turn = 1;
            // Rounds begin at least 1 s after each other: three rounds see some thousand writes.
            wait_until("all was looked at again and again", || {
                (0..20).for_each(|more| round(turn + more));
                turn += 20;
                of(&volume).rounds >= 3
            });
            volume.flush().unwrap();
            let found = of(&volume);
            let faults = (found.pages_repaired, found.pages_lost, found.copies_given_up);
            assert_eq!(faults, (0, 0, 0), "{found:?}");
            for page in 0..PAGES {
                let wanted = [(turn - 1 + page) as u8; PAGE_SIZE];
                assert_eq!(read(&volume, page * PAGE_SIZE as u64, PAGE_SIZE), wanted);
            }
            volume.release().unwrap();
        }
    }
}
