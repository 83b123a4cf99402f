//! The registry as one manager has it: of which term it is, and so for whom it may be opened.
//!
//! Decisions only: whether the manager leads comes in, and what is to be written down before
//! anybody is answered goes out. [`Ledger`](crate::records::ledger) writes it.

use crate::records::election::Term;
use crate::records::lasting::Changes;
use crate::registry::Registry;
use std::time::Duration;

/// A registry, and the term that it is of.
#[derive(Debug)]
pub struct Book {
    registry: Registry,
    /// When it was opened: the registry's clock begins there.
    opened: Duration,
    of: Option<Term>,
}

impl Book {
    /// Book of a manager that is alone, or does not lead yet.
    pub fn new(registry: Registry, now: Duration) -> Book {
        Book { registry, opened: now, of: None }
    }

    /// Takes over the registry that another manager has left. This one leads in `term`.
    pub fn take_over(&mut self, term: Term, registry: Registry, now: Duration) {
        *self = Book { registry, opened: now, of: Some(term) };
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

    /// Reads the registry.
    pub fn see<T>(&self, now: Duration, look: impl FnOnce(&Registry, Duration) -> T) -> T {
        look(&self.registry, now.saturating_sub(self.opened))
    }

    /// Changes the registry. The outcome may be told only when [`Book::unwritten`] is written.
    pub fn change<T>(
        &mut self,
        now: Duration,
        act: impl FnOnce(&mut Registry, Duration) -> T,
    ) -> T {
        act(&mut self.registry, now.saturating_sub(self.opened))
    }

    /// Changes that must be written before the next answer, if any.
    pub fn unwritten(&self) -> Option<&Changes> {
        Some(self.registry.changes()).filter(|changes| !changes.is_empty())
    }

    /// All of [`Book::unwritten`] is written down.
    pub fn written(&mut self) {
        self.registry.written();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::lasting::Lasting;

    #[test]
    fn a_book_of_an_earlier_term_is_closed() {
        let mut book = Book::new(Registry::default(), Duration::ZERO);
        assert!(!book.is_of(None) && !book.is_of(Some(Term(1))));
        book.take_over(Term(1), Registry::new(Lasting::default()), Duration::from_secs(7));
        assert!(book.is_of(Some(Term(1))));
        assert!(!book.is_of(None), "it leads no more");
        assert!(!book.is_of(Some(Term(3))), "it leads again, and others have led in between");
        assert_eq!(book.unwritten().and_then(|changes| changes.epoch), Some(1));
        book.written();
        assert_eq!(book.unwritten(), None);
        let age = book.see(Duration::from_secs(9), |registry, now| registry.status(now).uptime_ms);
        assert_eq!(age, 2000);
    }
}
