//! Completes an environment, so that the program started with it is on the pool, too.
//!
//! Pure: environments come in, and where to write the result.

use std::ffi::{CStr, c_char};

/// Variables that put a program on its pager, each `NAME=VALUE`; the library is a path alone.
#[derive(Clone, Copy)]
pub(super) struct Ours<'a> {
    pub(super) library: &'a [u8],
    pub(super) socket: &'a CStr,
    /// The consumer's key, and the limits of the largest mapping and of locked memory.
    pub(super) others: [Option<&'a CStr>; 3],
}

/// A variable that is written anew, from parts.
struct Joined<'a> {
    /// The place of the variable in the environment that was given.
    replaces: Option<usize>,
    parts: [&'a [u8]; 4],
}

/// An environment, and what it lacks.
pub(super) struct Plan<'a> {
    given: &'a [*const c_char],
    added: [Option<&'a CStr>; 4],
    joined: [Option<Joined<'a>>; 2],
}

const PRELOAD: &[u8] = b"LD_PRELOAD=";
const SANITIZER: &[u8] = b"ASAN_OPTIONS=";
const LINK_ORDER: &[u8] = b"verify_asan_link_order";
const LINK_ORDER_OFF: &[u8] = b"verify_asan_link_order=0";

impl<'a> Plan<'a> {
    /// # Safety
    /// `given` points to C strings, which stay as they are for `'a`.
    pub(super) unsafe fn new(given: &'a [*const c_char], ours: Ours<'a>) -> Plan<'a> {
        let find = |name: &[u8]| {
            given.iter().enumerate().find_map(|(at, variable)| {
                // SAFETY: the caller's promise.
                let variable: &'a [u8] = unsafe { CStr::from_ptr(*variable) }.to_bytes();
                variable.strip_prefix(name).map(|value| (at, value))
            })
        };
        let unless_there = |variable: &'a CStr| {
            let name = variable.to_bytes().split_inclusive(|byte| *byte == b'=').next();
            find(name.unwrap_or_default()).is_none().then_some(variable)
        };
        let preload = match find(PRELOAD) {
            Some((_, value)) if contains(value, ours.library) => None,
            Some((at, value)) if !value.is_empty() => {
                Some(Joined { replaces: Some(at), parts: [PRELOAD, ours.library, b":", value] })
            }
            other => Some(Joined {
                replaces: other.map(|(at, _)| at),
                parts: [PRELOAD, ours.library, b"", b""],
            }),
        };
        let sanitizer = match find(SANITIZER) {
            Some((_, value)) if contains(value, LINK_ORDER) => None,
            Some((at, value)) if !value.is_empty() => {
                Some(Joined { replaces: Some(at), parts: [SANITIZER, value, b":", LINK_ORDER_OFF] })
            }
            other => Some(Joined {
                replaces: other.map(|(at, _)| at),
                parts: [SANITIZER, LINK_ORDER_OFF, b"", b""],
            }),
        };
        let [key, largest_mapping, local] = ours.others;
        let added = [Some(ours.socket), key, largest_mapping, local];
        Plan {
            given,
            added: added.map(|variable| variable.and_then(unless_there)),
            joined: [preload, sanitizer],
        }
    }

    /// Whether the environment lacks nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.added.iter().all(Option::is_none) && self.joined.iter().all(Option::is_none)
    }

    /// Most pointers that the result has, with the null at its end.
    pub(super) fn pointers(&self) -> usize {
        self.given.len() + self.added.len() + self.joined.len() + 1
    }

    /// Bytes of the variables that are written anew.
    pub(super) fn bytes(&self) -> usize {
        let len = |joined: &Joined| joined.parts.iter().map(|part| part.len()).sum::<usize>() + 1;
        self.joined.iter().flatten().map(len).sum()
    }

    /// Writes the result. False if there is too little room.
    pub(super) fn write(&self, pointers: &mut [*const c_char], mut bytes: &mut [u8]) -> bool {
        if pointers.len() < self.pointers() || bytes.len() < self.bytes() {
            return false;
        }
        pointers.fill(std::ptr::null());
        pointers[..self.given.len()].copy_from_slice(self.given);
        let mut count = self.given.len();
        for variable in self.added.iter().flatten() {
            pointers[count] = variable.as_ptr();
            count += 1;
        }
        for joined in self.joined.iter().flatten() {
            let at = joined.replaces.unwrap_or(count);
            count = count.max(at + 1);
            pointers[at] = bytes.as_ptr().cast();
            for part in joined.parts.into_iter().chain([&b"\0"[..]]) {
                let (to, rest) = bytes.split_at_mut(part.len());
                to.copy_from_slice(part);
                bytes = rest;
            }
        }
        true
    }
}

fn contains(value: &[u8], part: &[u8]) -> bool {
    value.windows(part.len().max(1)).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Ours<'static> = Ours {
        library: b"/l.so",
        socket: c"HECATON_PAGER=/s",
        others: [Some(c"HECATON_KEY=k"), Some(c"HECATON_LARGEST_MAPPING=7"), None],
    };

    /// The completed environment; `None` if it lacks nothing.
    fn complete(given: &[&CStr]) -> Option<Vec<String>> {
        let given: Vec<_> = given.iter().map(|variable| variable.as_ptr()).collect();
        // SAFETY: C strings, which outlive the plan.
        let plan = unsafe { Plan::new(&given, OURS) };
        if plan.is_empty() {
            return None;
        }
        let mut pointers = vec![std::ptr::null(); plan.pointers()];
        let mut bytes = vec![0xff; plan.bytes()];
        assert!(!plan.write(&mut pointers[1..], &mut bytes));
        assert!(plan.write(&mut pointers, &mut bytes));
        let variables = pointers.iter().take_while(|pointer| !pointer.is_null());
        // SAFETY: C strings, which were written just now or given.
        let text = |at: &*const c_char| unsafe { CStr::from_ptr(*at) }.to_str().unwrap().to_owned();
        Some(variables.map(text).collect())
    }

    #[test]
    fn empty_environment_gets_all_variables() {
        let expected = [
            "HECATON_PAGER=/s",
            "HECATON_KEY=k",
            "HECATON_LARGEST_MAPPING=7",
            "LD_PRELOAD=/l.so",
            "ASAN_OPTIONS=verify_asan_link_order=0",
        ];
        assert_eq!(complete(&[]).unwrap(), expected);
    }

    #[test]
    fn complete_environment_stays() {
        let all = [
            c"HECATON_PAGER=/another",
            c"HECATON_KEY=another",
            c"HECATON_LARGEST_MAPPING=1",
            c"LD_PRELOAD=/x.so:/l.so",
            c"ASAN_OPTIONS=verify_asan_link_order=1",
        ];
        assert_eq!(complete(&all), None);
    }

    #[test]
    fn variables_of_the_program_stay_in_their_places() {
        let given =
            [c"LD_PRELOAD=/x.so", c"A=b", c"ASAN_OPTIONS=detect_leaks=0", c"HECATON_PAGER="];
        let expected = [
            "LD_PRELOAD=/l.so:/x.so",
            "A=b",
            "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0",
            "HECATON_PAGER=",
            "HECATON_KEY=k",
            "HECATON_LARGEST_MAPPING=7",
        ];
        assert_eq!(complete(&given).unwrap(), expected);
        let empty = complete(&[c"LD_PRELOAD=", c"XLD_PRELOAD=/l.so"]).unwrap();
        assert_eq!(empty[..2], ["LD_PRELOAD=/l.so", "XLD_PRELOAD=/l.so"]);
    }
}
