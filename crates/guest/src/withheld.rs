//! Answers to the host that wait until memory is readied for it. No I/O and no clock.
//!
//! What the host asks for meanwhile, the driver would have to work for, and would hold up the readying besides: the two
//! take turns in the kernel.

use hecaton_vm::guest_port::GuestMessage;
use std::time::Duration;

/// How long: whoever has waited for applications has no more time than this to spare.
const PATIENCE: Duration = Duration::from_secs(1);

/// Those that wait, and since when.
#[derive(Debug, Default)]
pub(crate) struct Withheld(Vec<(GuestMessage, Duration)>);

impl Withheld {
    /// Has one wait.
    pub(crate) fn keep(&mut self, answer: GuestMessage, now: Duration) {
        self.0.push((answer, now));
    }

    /// Whether one waits.
    pub(crate) fn is_some(&self) -> bool {
        !self.0.is_empty()
    }

    /// Those that can be given: all is readied, or has had its time.
    pub(crate) fn due(&mut self, is_readied: bool, now: Duration) -> Vec<GuestMessage> {
        let is_due = |(_, since): &mut (GuestMessage, Duration)| {
            is_readied || now.saturating_sub(*since) >= PATIENCE
        };
        self.0.extract_if(.., is_due).map(|(answer, _)| answer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(id: u64) -> GuestMessage {
        GuestMessage::Ready { id, available_bytes: 0, late: Vec::new() }
    }

    #[test]
    fn an_answer_is_given_once_when_all_is_readied_or_has_had_its_time() {
        let at = Duration::from_millis;
        let mut withheld = Withheld::default();
        assert_eq!(withheld.due(true, at(0)), []);
        withheld.keep(answer(1), at(100));
        assert_eq!(withheld.due(false, at(200)), []);
        assert!(withheld.is_some());
        assert_eq!(withheld.due(true, at(300)), [answer(1)]);
        assert_eq!((withheld.due(true, at(400)), withheld.is_some()), (vec![], false));
        withheld.keep(answer(2), at(1000));
        withheld.keep(answer(3), at(1500));
        assert_eq!(withheld.due(false, at(1900)), []);
        assert_eq!(withheld.due(false, at(2000)), [answer(2)]);
        assert_eq!(withheld.due(true, at(2100)), [answer(3)]);
    }
}
