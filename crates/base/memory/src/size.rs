//! Sizes as people write them: `512M`, `8G`.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// A number of bytes, written with a binary suffix: `4096`, `64K`, `512M`, `8G`, `1.5T`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Size(pub u64);

/// Why a text is not a [`Size`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a size: write a number with K, M, G or T, such as 512M or 8G")]
pub struct ParseSizeError(pub String);

const UNITS: [(char, u64); 4] = [('T', 1 << 40), ('G', 1 << 30), ('M', 1 << 20), ('K', 1 << 10)];

impl FromStr for Size {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || ParseSizeError(text.to_owned());
        let trimmed = text.trim();
        let number = trimmed.strip_suffix("iB").or(trimmed.strip_suffix('B')).unwrap_or(trimmed);
        let last = number.chars().last().ok_or_else(fail)?.to_ascii_uppercase();
        let (digits, unit) = match UNITS.iter().find(|(suffix, _)| *suffix == last) {
            Some((_, unit)) => (&number[..number.len() - 1], *unit),
            None => (number, 1),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
            return Err(fail());
        }
        if let Ok(whole) = digits.parse::<u64>() {
            return whole.checked_mul(unit).map(Size).ok_or_else(fail);
        }
        let value = digits.parse::<f64>().map_err(|_| fail())? * unit as f64;
        if value.is_finite() && value < u64::MAX as f64 && unit > 1 {
            Ok(Size(value as u64))
        } else {
            Err(fail())
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((suffix, unit)) if self.0.is_multiple_of(*unit) => {
                write!(f, "{}{suffix}", self.0 / unit)
            }
            Some((suffix, unit)) => write!(f, "{:.1}{suffix}", self.0 as f64 / *unit as f64),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64K", 64 << 10),
            ("512m", 512 << 20),
            ("8G", 8 << 30),
            ("8GiB", 8 << 30),
            ("1.5T", 3 << 39),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "G", "-1G", "8Q", "1e3", "99999999999T", "8 G x", "1.5", "1.2.3G"] {
            assert_eq!(text.parse::<Size>(), Err(ParseSizeError(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn shows_the_largest_whole_unit() {
        assert_eq!(Size(8 << 30).to_string(), "8G");
        assert_eq!(Size(1536 << 20).to_string(), "1.5G");
        assert_eq!(Size(12).to_string(), "12");
    }
}
