//! Tells donors which pages and whole segments the pager no longer uses.
//!
//! Runs in a thread of its own, because it waits for unreachable donors. Pages that a donor could
//! not be told of stay unused, and are retried. So the pager never gives new pages a place that it
//! cannot write to.

use crate::shared::Shared;
use crate::state::space_pages::GiveBack;
use hecaton_space::{Space, SpaceError};
use std::time::{Duration, Instant};

/// How often donors are told again of what they could not be told of.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs until the consumer has ended.
pub(crate) fn run(shared: &Shared, space: &Space) {
    each(shared, |what| {
        let given = give(shared, space, what);
        match &given {
            // Copies of it are on their way; that is as it should be.
            Err(error @ SpaceError::Coded { .. }) => {
                tracing::debug!(%error, segment = what.segment(), "pages wait to be given back");
            }
            Err(error) => {
                let segment = what.segment();
                tracing::warn!(%error, segment, "pages could not be given back yet");
            }
            Ok(_) => {}
        }
        given.is_ok_and(|given| given)
    });
}

/// Has everything given back by `give`, which may take long, and is asked again if it is in vain.
fn each(shared: &Shared, mut give: impl FnMut(&GiveBack) -> bool) {
    let mut tried_again = Instant::now();
    loop {
        let mut core = shared.lock();
        // Everything is given back at once when the consumer has ended.
        if core.over {
            return;
        }
        if tried_again.elapsed() >= AGAIN {
            tried_again = Instant::now();
            core.pages.try_again();
        }
        let next = if core.failed.is_some() { None } else { core.pages.next_to_give_back() };
        let Some(what) = next else {
            drop(shared.give_back.wait_timeout(core, AGAIN).expect("never poisoned"));
            continue;
        };
        drop(core);
        let given = give(&what);
        shared.lock().pages.gave_back(&what, given);
    }
}

/// False if the donor is known to be away: it is heard of when the lease is renewed.
fn give(shared: &Shared, space: &Space, what: &GiveBack) -> Result<bool, SpaceError> {
    if !space.is_reachable(what.segment()) {
        return Ok(false);
    }
    if what.is_whole_segment() {
        space.free_segment(what.segment())?;
        shared.lock().state.segment_freed(what.segment());
    } else {
        let pages = what.pages();
        let generations = space.discard(pages.start, pages.end - pages.start)?;
        let core = shared.lock();
        for (segment, generation) in generations {
            core.state.acknowledged(segment, generation);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::inherit::tests::{PARENT, pager};
    use crate::state::CHUNK_PAGES;
    use crate::state::tables::Key;
    use std::sync::mpsc::channel;

    #[test]
    fn a_donor_that_is_waited_for_holds_nobody_up() {
        let shared = Shared::new(pager(), None).unwrap();
        let allocate = |chunk: u64| {
            let mut guard = shared.lock();
            let core = &mut *guard;
            core.pages.allocate(&core.state, Key::new(PARENT, chunk * CHUNK_PAGES), None)
        };
        let (first, second) = (allocate(1), allocate(2));
        let mut guard = shared.lock();
        let core = &mut *guard;
        core.pages.release(&core.state, first).unwrap();
        core.pages.take_emptied().into_iter().for_each(|slot| core.pages.may_leave(slot));
        drop(guard);

        let ((began, begins), (answer, answers)) = (channel(), channel());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                each(&shared, move |what| {
                    began.send(what.pages()).unwrap();
                    answers.recv().unwrap()
                });
            });
            let what = begins.recv().unwrap();
            assert_eq!(what, first..first + CHUNK_PAGES);
            // Others go on meanwhile, elsewhere.
            assert_eq!(allocate(3), second + CHUNK_PAGES);
            answer.send(false).unwrap();
            assert_eq!(begins.recv().unwrap(), what, "it is tried again");
            answer.send(true).unwrap();
            shared.lock().over = true;
            shared.give_back.notify_all();
        });
        assert_eq!(allocate(4), first);
    }
}
