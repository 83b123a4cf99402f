//! The registry as one manager has it: of which term it is, and so for whom it may be opened.
//!
//! Decisions only: whether the manager leads comes in, and what is to be written down before an
//! answer leaves goes out. [`Ledger`](crate::records::ledger) writes it, and the book is open
//! meanwhile: requests read and change it. One write is under way at most, and the next one has
//! all changes that have come since.

use crate::records::election::Term;
use crate::records::lasting::Changes;
use crate::registry::Registry;
use std::time::Duration;

/// Place of a change among those of its term. The answer may leave once the change is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    term: Option<Term>,
    number: u64,
}

/// Whether an answer may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Yes: its change is written, and so are all before it.
    Durable,
    /// Not yet.
    Pending,
    /// A write that contained its change failed. The next one contains it again.
    Failed,
    /// No: the registry of another term has replaced the one that it changed.
    Superseded,
}

/// All that was unwritten at one moment.
#[derive(Clone, Debug)]
pub struct Write {
    /// Changes to write, all or none.
    pub changes: Changes,
    /// Last change in it.
    last: Receipt,
}

impl Write {
    /// The term that the changes are of.
    pub fn term(&self) -> Option<Term> {
        self.last.term
    }
}

/// A registry, the term that it is of, and how far its changes are durable.
#[derive(Debug)]
pub struct Book {
    registry: Registry,
    /// When it was opened: the registry's clock begins there.
    opened: Duration,
    of: Option<Term>,
    /// Number of the last change, of the last durable one, and of the last one in a failed write.
    last: u64,
    durable: u64,
    failed: u64,
    /// A write is under way. There is one at most, and it ends before the next begins.
    is_writing: bool,
}

impl Book {
    /// Book of a manager that is alone, or does not lead yet.
    pub fn new(registry: Registry, now: Duration) -> Book {
        Book::of(None, registry, now)
    }

    fn of(of: Option<Term>, registry: Registry, opened: Duration) -> Book {
        Book { registry, opened, of, last: 0, durable: 0, failed: 0, is_writing: false }
    }

    /// Takes over the registry that another manager has left. This one leads in `term`. A write of
    /// an earlier term that is still under way means nothing to it.
    pub fn take_over(&mut self, term: Term, registry: Registry, now: Duration) {
        *self = Book::of(Some(term), registry, now);
    }

    /// The term that the registry is of.
    pub fn term(&self) -> Option<Term> {
        self.of
    }

    /// Whether a manager may go by it that leads in this term, or in none: in a later one it has to
    /// read first what others have written meanwhile.
    pub fn is_of(&self, leads: Option<Term>) -> bool {
        leads.is_some() && leads == self.of
    }

    /// Reads the registry, with changes that are not durable yet.
    pub fn see<T>(&self, now: Duration, look: impl FnOnce(&Registry, Duration) -> T) -> T {
        look(&self.registry, now.saturating_sub(self.opened))
    }

    /// Changes the registry. The outcome may be told once the receipt is durable.
    pub fn change<T>(
        &mut self,
        now: Duration,
        act: impl FnOnce(&mut Registry, Duration) -> T,
    ) -> (T, Receipt) {
        let outcome = act(&mut self.registry, now.saturating_sub(self.opened));
        self.last += 1;
        if self.registry.changes().is_empty() {
            self.durable = self.last;
        }
        (outcome, self.receipt())
    }

    fn receipt(&self) -> Receipt {
        Receipt { term: self.of, number: self.last }
    }

    /// Whether the answer to that change may leave.
    pub fn durability(&self, receipt: Receipt) -> Durability {
        match receipt {
            Receipt { term, .. } if term != self.of => Durability::Superseded,
            Receipt { number, .. } if number <= self.durable => Durability::Durable,
            Receipt { number, .. } if number <= self.failed => Durability::Failed,
            Receipt { .. } => Durability::Pending,
        }
    }

    /// Begins a write, if some answer waits for one and none is under way. What was in a failed
    /// write is written with the next change.
    pub fn begin_write(&mut self) -> Option<Write> {
        let is_waited_for = self.last > self.durable.max(self.failed);
        if self.is_writing || !is_waited_for {
            return None;
        }
        self.is_writing = true;
        Some(Write { changes: self.registry.changes().clone(), last: self.receipt() })
    }

    /// Ends a write: all of it is durable, or nothing is known to be.
    pub fn end_write(&mut self, write: &Write, is_durable: bool) {
        if write.term() != self.of {
            return;
        }
        self.is_writing = false;
        if is_durable {
            self.durable = self.durable.max(write.last.number);
            self.registry.settle(&write.changes);
        } else {
            self.failed = write.last.number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::lasting::Lasting;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_book_of_an_earlier_term_is_closed() {
        let mut book = Book::new(Registry::default(), Duration::ZERO);
        assert!(!book.is_of(None) && !book.is_of(Some(Term(1))));
        book.take_over(Term(1), Registry::new(Lasting::default()), Duration::from_secs(7));
        assert!(book.is_of(Some(Term(1))));
        assert!(!book.is_of(None), "it leads no more");
        assert!(!book.is_of(Some(Term(3))), "it leads again, and others have led in between");
        let ((), receipt) = book.change(Duration::from_secs(8), |_, _| ());
        let write = book.begin_write().expect("the epoch is to be written");
        assert_eq!((write.term(), write.changes.epoch), (Some(Term(1)), Some(1)));
        book.end_write(&write, true);
        assert_eq!(book.durability(receipt), Durability::Durable);
        let age = book.see(Duration::from_secs(9), |registry, now| registry.status(now).uptime_ms);
        assert_eq!(age, 2000);
    }

    #[test]
    fn a_write_of_an_earlier_term_ends_nothing() {
        let mut book = Book::new(Registry::default(), Duration::ZERO);
        book.take_over(Term(1), Registry::new(Lasting::default()), Duration::ZERO);
        let ((), early) = book.change(Duration::ZERO, |_, _| ());
        let late = book.begin_write().expect("the epoch is to be written");
        book.take_over(Term(3), Registry::new(Lasting::default()), Duration::ZERO);
        assert_eq!(book.durability(early), Durability::Superseded);
        let ((), receipt) = book.change(Duration::ZERO, |_, _| ());
        let write = book.begin_write().expect("nothing of this term is under way");
        book.end_write(&late, true);
        assert_eq!(book.durability(receipt), Durability::Pending);
        assert!(book.begin_write().is_none(), "one is under way");
        book.end_write(&write, true);
        assert_eq!(book.durability(receipt), Durability::Durable);
    }

    /// A step of a manager with a file.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// It limits one of two donors.
        Limit(bool, u64),
        Begin,
        End(bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (any::<bool>(), 0_u64..3).prop_map(|(donor, bytes)| Step::Limit(donor, bytes)),
            Just(Step::Begin),
            any::<bool>().prop_map(Step::End),
        ]
    }

    proptest! {
        /// Whenever an answer may leave, its change or a later one is in the file; and once all
        /// answers may, the file says what the registry says.
        #[test]
        fn an_answer_leaves_when_its_change_is_durable(
            steps in prop::collection::vec(step(), 1..64),
        ) {
            let names = ["a", "b"];
            let mut file = Lasting::default();
            let mut book = Book::new(Registry::new(file.clone()), Duration::ZERO);
            let mut under_way = None;
            // Values that each donor was given, with their receipts, in order.
            let mut given: BTreeMap<&str, Vec<(u64, Receipt)>> = BTreeMap::new();
            let ends = [Step::End(true), Step::Begin, Step::End(true)];
            for step in steps.into_iter().chain([Step::Limit(true, 7)]).chain(ends) {
                match step {
                    Step::Limit(donor, bytes) => {
                        let donor = names[usize::from(donor)];
                        let ((), receipt) = book.change(Duration::ZERO, |registry, _| {
                            registry.set_limit(donor, Some(bytes));
                        });
                        given.entry(donor).or_default().push((bytes, receipt));
                    }
                    Step::Begin => under_way = under_way.or_else(|| book.begin_write()),
                    Step::End(is_durable) => {
                        let Some(write) = under_way.take() else { continue };
                        if is_durable {
                            file.apply(&write.changes);
                        }
                        book.end_write(&write, is_durable);
                    }
                }
                for (donor, given) in &given {
                    let is_durable = |receipt| book.durability(receipt) == Durability::Durable;
                    let durable = given.iter().rposition(|(_, receipt)| is_durable(*receipt));
                    let Some(durable) = durable else { continue };
                    let found = file.limits.get(*donor);
                    let may_be_found = given[durable..].iter().any(|(value, _)| found == Some(value));
                    prop_assert!(may_be_found, "{donor}: {found:?}");
                    prop_assert!(given[..durable].iter().all(|(_, receipt)| is_durable(*receipt)));
                }
            }
            for (donor, given) in given {
                let (bytes, receipt) = given[given.len() - 1];
                prop_assert_eq!(book.durability(receipt), Durability::Durable);
                prop_assert_eq!(file.limits.get(donor), Some(&bytes));
            }
            prop_assert!(book.begin_write().is_none());
        }
    }
}
