//! A QEMU command line as a list of options.
//!
//! QEMU takes `-name value` and `--name value`; whether an option has a value is known only from
//! its table of options. The ones without are listed here; QEMU adds few, and one that is not
//! listed takes its neighbour for a value, which leaves both in their place.

use std::ffi::OsString;

/// Options of QEMU 7.2 to 10 that take no value.
const SWITCHES: [&str; 40] = [
    "S",
    "alt-grab",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "g-none",
    "h",
    "help",
    "mem-prealloc",
    "no-acpi",
    "no-bios",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "nouserconfig",
    "old-param",
    "only-migratable",
    "portrait",
    "preconfig",
    "rotate-none",
    "s",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
    "sdl",
];

/// A word or two of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// `-name value`.
    Option {
        /// Without its dashes.
        name: String,
        /// The word after the name.
        value: String,
    },
    /// `-name` alone.
    Switch(String),
    /// A disk image that no option names, or a word that is no Unicode.
    Other(OsString),
}

/// Takes a command line apart, the program's name left out.
pub fn parse(arguments: &[OsString]) -> Vec<Word> {
    let mut words = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let dashed = argument.to_str().and_then(|text| text.strip_prefix('-'));
        let Some(name) = dashed.map(|name| name.strip_prefix('-').unwrap_or(name)) else {
            words.push(Word::Other(argument.clone()));
            continue;
        };
        if name.is_empty() {
            words.push(Word::Other(argument.clone()));
        } else if SWITCHES.contains(&name) {
            words.push(Word::Switch(name.to_owned()));
        } else {
            match rest.next().map(|value| (value, value.to_str())) {
                Some((_, Some(value))) => {
                    words.push(Word::Option { name: name.to_owned(), value: value.to_owned() });
                }
                // Not Unicode: none of the options that are looked at.
                Some((value, None)) => {
                    words.extend([Word::Other(argument.clone()), Word::Other(value.clone())]);
                }
                None => words.push(Word::Switch(name.to_owned())),
            }
        }
    }
    words
}

/// The command line again.
pub fn to_arguments(words: &[Word]) -> Vec<OsString> {
    words
        .iter()
        .flat_map(|word| match word {
            Word::Option { name, value } => vec![format!("-{name}").into(), value.into()],
            Word::Switch(name) => vec![format!("-{name}").into()],
            Word::Other(text) => vec![text.clone()],
        })
        .collect()
}

impl Word {
    /// The value, if this is one of the options `names`.
    pub fn value_of(&self, names: &[&str]) -> Option<&str> {
        match self {
            Word::Option { name, value } if names.contains(&name.as_str()) => Some(value),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn options_switches_and_images_are_told_apart() {
        let arguments: Vec<OsString> =
            "-m 4G -nographic disk.img --smp 2 -S".split(' ').map(Into::into).collect();
        let words = parse(&arguments);
        assert_eq!(words[0], Word::Option { name: "m".into(), value: "4G".into() });
        assert_eq!(words[1], Word::Switch("nographic".into()));
        assert_eq!(words[2], Word::Other("disk.img".into()));
        assert_eq!(words[3].value_of(&["smp"]), Some("2"));
        assert_eq!(to_arguments(&words).join(OsString::from(" ").as_os_str()), {
            OsString::from("-m 4G -nographic disk.img -smp 2 -S")
        });
    }

    proptest! {
        #[test]
        fn an_unchanged_command_line_stays_as_it_is(
            arguments in proptest::collection::vec("-?[a-zA-Z0-9,=.]{0,8}", 0..12),
        ) {
            let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
            prop_assert_eq!(to_arguments(&parse(&arguments)), arguments);
        }
    }
}
