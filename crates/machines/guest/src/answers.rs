//! Decides which answers about an announced size the host gets, and when. Pure: no I/O, no clock.
//!
//! While applications give back, the host hears how small the VM can already be, and takes that
//! memory early. The final answer also waits for memory being readied. If the host asks before
//! that, the driver must work for it and delays the readying: both take turns in the kernel.

use crate::governor::Announcement;
use hecaton_vm::guest_port::GuestMessage;
use std::time::Duration;

/// Time that an answer waits for memory being readied, without progress.
const PATIENCE: Duration = Duration::from_secs(1);

/// Least further bytes that are worth a message, except for the last one.
const STEP_BYTES: u64 = 64 << 20;

/// Announcement and memory at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) announced: Option<Announcement>,
    /// Bytes that the host can take without delay.
    pub(crate) takeable_bytes: u64,
    /// No more memory is being readied.
    pub(crate) is_readied: bool,
}

/// Tracks what was sent and which answers are withheld.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    progress: Option<Progress>,
    /// Withheld answers, each with its time of arrival.
    withheld: Vec<(GuestMessage, Duration)>,
    /// Last time that the possible size reached a new minimum.
    advanced_at: Duration,
}

/// Progress towards one announced size.
#[derive(Clone, Copy, Debug)]
struct Progress {
    id: u64,
    /// Smallest size that the VM could have so far, in bytes.
    least_bytes: u64,
    /// Smallest size that the host was told, in bytes; 0 after the final answer.
    said_bytes: u64,
}

impl Answers {
    /// Withholds an answer until it is due.
    pub(crate) fn keep(&mut self, answer: GuestMessage, now: Duration) {
        self.withheld.push((answer, now));
    }

    /// Whether an answer is withheld.
    pub(crate) fn are_awaited(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// Returns the messages to send now.
    pub(crate) fn due(&mut self, view: &View, now: Duration) -> Vec<GuestMessage> {
        let giving = self.advance(view, now);
        let advanced_at = self.advanced_at;
        let is_due = |(_, since): &mut (GuestMessage, Duration)| {
            view.is_readied || now.saturating_sub(advanced_at.max(*since)) >= PATIENCE
        };
        let ready: Vec<_> =
            self.withheld.extract_if(.., is_due).map(|(answer, _)| answer).collect();
        if ready.is_empty() {
            return giving.into_iter().collect();
        }
        let answers = |id| {
            let mut ready = ready.iter();
            ready.any(|answer| matches!(answer, GuestMessage::Ready { id: of, .. } if *of == id))
        };
        match &mut self.progress {
            // After the final answer the host needs no partial one, now or later.
            Some(progress) if answers(progress.id) => {
                progress.said_bytes = 0;
                ready
            }
            _ => giving.into_iter().chain(ready).collect(),
        }
    }

    fn advance(&mut self, view: &View, now: Duration) -> Option<GuestMessage> {
        let Some(Announcement { id, target_bytes, owed_bytes, is_under_way }) = view.announced
        else {
            self.progress = None;
            return None;
        };
        let whole_bytes = target_bytes.saturating_add(owed_bytes);
        let takeable_bytes = if is_under_way { view.takeable_bytes.min(owed_bytes) } else { 0 };
        let size_bytes = whole_bytes - takeable_bytes;
        let begun = Progress { id, least_bytes: whole_bytes, said_bytes: whole_bytes };
        let progress = match &mut self.progress {
            Some(progress) if progress.id == id => progress,
            other => other.insert(begun),
        };
        if size_bytes < progress.least_bytes {
            progress.least_bytes = size_bytes;
            self.advanced_at = now;
        }
        let more_bytes = progress.said_bytes.saturating_sub(progress.least_bytes);
        let is_last = progress.least_bytes <= target_bytes;
        if more_bytes >= STEP_BYTES || (is_last && more_bytes > 0) {
            progress.said_bytes = progress.least_bytes;
            return Some(GuestMessage::Giving { id, size_bytes: progress.least_bytes });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    fn ready(id: u64) -> GuestMessage {
        GuestMessage::Ready { id, available_bytes: 0, late: Vec::new() }
    }

    fn giving(id: u64, mib: u64) -> GuestMessage {
        GuestMessage::Giving { id, size_bytes: mib * M }
    }

    /// A VM with a target of 1 GiB, `owed` MiB to give back, and `takeable` MiB ready for it.
    fn view(id: u64, owed: u64, takeable: u64) -> View {
        let (target_bytes, owed_bytes) = (1024 * M, owed * M);
        View {
            announced: Some(Announcement { id, target_bytes, owed_bytes, is_under_way: true }),
            takeable_bytes: takeable * M,
            is_readied: true,
        }
    }

    const NOTHING: View = View { announced: None, takeable_bytes: 0, is_readied: true };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn an_answer_is_given_once_when_all_is_readied_or_nothing_comes_of_it() {
        let mut answers = Answers::default();
        let busy = View { is_readied: false, ..NOTHING };
        assert_eq!(answers.due(&NOTHING, at(0)), []);
        answers.keep(ready(1), at(100));
        assert_eq!(answers.due(&busy, at(200)), []);
        assert!(answers.are_awaited());
        assert_eq!(answers.due(&NOTHING, at(300)), [ready(1)]);
        assert_eq!((answers.due(&NOTHING, at(400)), answers.are_awaited()), (vec![], false));
        answers.keep(ready(2), at(1000));
        answers.keep(ready(3), at(1500));
        assert_eq!(answers.due(&busy, at(1900)), []);
        assert_eq!(answers.due(&busy, at(2000)), [ready(2)]);
        assert_eq!(answers.due(&NOTHING, at(2100)), [ready(3)]);
    }

    #[test]
    fn as_long_as_there_is_ever_more_an_answer_waits() {
        let mut answers = Answers::default();
        let busy = |owed, takeable| View { is_readied: false, ..view(7, owed, takeable) };
        answers.due(&busy(512, 0), at(0));
        answers.keep(ready(7), at(0));
        assert_eq!(answers.due(&busy(512, 128), at(900)), [giving(7, 1408)]);
        // The host has taken that: no more memory is ready than before.
        assert_eq!(answers.due(&busy(384, 0), at(1200)), []);
        assert_eq!(answers.due(&busy(384, 128), at(1800)), [giving(7, 1280)]);
        assert_eq!(answers.due(&busy(384, 128), at(2799)), []);
        assert_eq!(answers.due(&busy(384, 128), at(2800)), [ready(7)]);
        assert_eq!(answers.due(&busy(256, 256), at(2900)), [], "it may take all");
    }

    #[test]
    fn the_host_hears_of_what_it_can_take_once_and_of_ever_less() {
        let mut answers = Answers::default();
        assert_eq!(answers.due(&view(1, 300, 63), at(0)), [], "too little");
        assert_eq!(answers.due(&view(1, 300, 64), at(0)), [giving(1, 1260)]);
        assert_eq!(answers.due(&view(1, 300, 64), at(0)), []);
        assert_eq!(answers.due(&view(1, 300, 0), at(0)), [], "somebody needed it");
        assert_eq!(answers.due(&view(1, 300, 140), at(0)), [giving(1, 1184)]);
        assert_eq!(answers.due(&view(1, 300, 299), at(0)), [giving(1, 1025)]);
        assert_eq!(answers.due(&view(1, 300, 4096), at(0)), [giving(1, 1024)], "the last");
        // Another size starts anew; without an announcement the host hears nothing.
        assert_eq!(answers.due(&view(2, 300, 100), at(0)), [giving(2, 1224)]);
        assert_eq!(answers.due(&NOTHING, at(0)), []);
        assert_eq!(answers.due(&view(2, 300, 100), at(0)), [giving(2, 1224)]);
    }

    #[test]
    fn nothing_is_taken_of_what_nobody_has_given_yet() {
        let mut answers = Answers::default();
        let mut early = view(1, 300, 300);
        early.announced.as_mut().unwrap().is_under_way = false;
        assert_eq!(answers.due(&early, at(0)), []);
        assert_eq!(answers.due(&view(1, 300, 300), at(0)), [giving(1, 1024)]);
    }

    #[test]
    fn an_answer_to_something_else_says_nothing_of_the_size() {
        let mut answers = Answers::default();
        answers.keep(ready(9), at(0));
        assert_eq!(answers.due(&view(1, 300, 100), at(0)), [giving(1, 1224), ready(9)]);
        assert_eq!(answers.due(&view(1, 300, 200), at(0)), [giving(1, 1124)]);
    }
}
