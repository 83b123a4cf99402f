//! The registry's keeper, as etcd is to managers: one key with a lease, a number for each making of
//! it, and what is written as long as that number is the last one.

use super::Answer;
use hecaton_manager::records::election::{Ask, Heard, Term};
use hecaton_manager::records::lasting::{Changes, Lasting};
use hecaton_manager::records::pen::{Stamp, Stroke};
use std::time::Duration;

/// How long a manager leads without renewing its lease, on the managers' clock.
pub(super) const LEASE: Duration = Duration::from_secs(5);

/// A manager's process: its number, and which life of it.
pub(super) type Process = (usize, u64);

#[derive(Default)]
pub(super) struct Keeper {
    /// Holder of the key, the lease that was made for it, and the end of that lease.
    holder: Option<(Process, Term, Duration)>,
    term: u64,
    pub(super) lasting: Lasting,
    /// Stamp that the last write has left.
    pub(super) stamp: Option<Stamp>,
    /// Writes of terms that are over.
    pub(super) superseded: u64,
    /// Writes that came after later ones.
    pub(super) overtaken: u64,
}

impl Keeper {
    /// `lease` is the one that is to be renewed.
    pub(super) fn ask(
        &mut self,
        now: Duration,
        who: Process,
        ask: Ask,
        lease: Option<Term>,
    ) -> Heard {
        self.let_go(now);
        match (ask, &mut self.holder) {
            (Ask::Campaign, None) => {
                self.term += 1;
                self.holder = Some((who, Term(self.term), now + LEASE));
                Heard::Won(Term(self.term))
            }
            (Ask::Campaign, Some(((number, _), ..))) => Heard::Other(number.to_string()),
            (Ask::Renew, Some((_, held, until))) if lease == Some(*held) => {
                *until = now + LEASE;
                Heard::Renewed
            }
            (Ask::Renew, _) => Heard::Gone,
        }
    }

    /// Takes changes if the term is the last one, and if they find the stamp that they are to come
    /// after.
    pub(super) fn write(
        &mut self,
        now: Duration,
        term: Term,
        stroke: Stroke,
        changes: &Changes,
    ) -> Answer {
        self.let_go(now);
        if self.holder.is_none() || term.0 != self.term {
            self.superseded += 1;
            return Answer::Superseded;
        }
        if stroke.after != self.stamp {
            self.overtaken += 1;
            return Answer::Overtaken;
        }
        self.lasting.apply(changes);
        self.stamp = Some(stroke.leaves);
        Answer::Written
    }

    /// Ends a lease.
    pub(super) fn revoke(&mut self, lease: Term) {
        self.holder = self.holder.filter(|(_, held, _)| *held != lease);
    }

    /// How many terms there have been.
    pub(super) fn terms(&self) -> u64 {
        self.term
    }

    fn let_go(&mut self, now: Duration) {
        self.holder = self.holder.filter(|(.., until)| now < *until);
    }
}
