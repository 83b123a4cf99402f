//! In which order one manager's writes land.
//!
//! Decisions only. A write of which nobody has heard may still land: a member of etcd that hangs
//! holds it, and the manager goes on with another member. If it landed after a later one of the
//! same term, it would undo what that one said, and what was answered would be forgotten by the
//! next manager. So each write leaves a [`Stamp`], and is taken only if it finds the one that it
//! was told to come after.

use crate::records::election::Term;
use std::fmt;
use std::str::FromStr;

/// Mark that a write leaves: each write has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    term: u64,
    number: u64,
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.term, self.number)
    }
}

impl FromStr for Stamp {
    type Err = String;

    fn from_str(text: &str) -> Result<Stamp, String> {
        let parsed = text.split_once(' ').and_then(|(term, number)| {
            Some(Stamp { term: term.parse().ok()?, number: number.parse().ok()? })
        });
        parsed.ok_or_else(|| format!("`{text}` is no stamp of a write"))
    }
}

/// A write that is to land after one, and before all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stroke {
    /// Stamp that the write must find; none if no write came before.
    pub after: Option<Stamp>,
    /// Stamp that the write leaves.
    pub leaves: Stamp,
}

/// Numbers the writes of one manager.
#[derive(Clone, Debug, Default)]
pub struct Pen {
    drawn: u64,
    /// Stamp of the last write, if that is known.
    found: Option<Option<Stamp>>,
}

impl Pen {
    /// The next write, of this term. None if it has to be looked first what is there.
    pub fn stroke(&mut self, term: Term) -> Option<Stroke> {
        let after = self.found?;
        self.drawn += 1;
        Some(Stroke { after, leaves: Stamp { term: term.0, number: self.drawn } })
    }

    /// That is what the last write has left.
    pub fn found(&mut self, stamp: Option<Stamp>) {
        self.found = Some(stamp);
    }

    /// The write was taken.
    pub fn taken(&mut self, stroke: Stroke) {
        self.found = Some(Some(stroke.leaves));
    }

    /// It was not, because something else was there; or nobody has said so, and it may still be
    /// taken.
    pub fn unsure(&mut self) {
        self.found = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_is_late_finds_another_stamp() {
        let mut pen = Pen::default();
        assert_eq!(pen.stroke(Term(3)), None, "what is there is not known");
        pen.found(None);
        let mut there = None;
        let mut land = |stroke: Stroke| {
            let is_taken = stroke.after == there;
            there = if is_taken { Some(stroke.leaves) } else { there };
            (is_taken, there)
        };
        let late = pen.stroke(Term(3)).expect("it is known");
        pen.unsure();
        assert_eq!(pen.stroke(Term(3)), None);
        pen.found(None);
        let next = pen.stroke(Term(3)).expect("it is known");
        assert!(land(next).0);
        pen.taken(next);
        assert!(!land(late).0, "it has been overtaken");
        let third = pen.stroke(Term(3)).expect("it is known");
        assert_eq!(land(third), (true, Some(third.leaves)));
        assert_eq!(third.leaves.to_string().parse(), Ok(third.leaves));
        assert!("3".parse::<Stamp>().is_err());
    }
}
