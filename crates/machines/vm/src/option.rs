//! The value of a QEMU option: `q35,accel=tcg`, or the same as JSON.
//!
//! QEMU's own rules (`util/qemu-option.c`, `util/keyval.c`):
//!
//! - Commas separate parts; a comma within a value is doubled.
//! - A first part without `=` is the value of the option's implied key.
//! - Any other part without `=` is a switch that is on.
//!
//! `-object`, `-device` and `-blockdev` take JSON as well; nested members are named with dots, as
//! in the other notation.

use serde_json::Value;

/// An option's value, taken apart. It is written again as it was read, but for what was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionValue {
    form: Form,
    parts: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    /// The first part had no `=`, and this is its key.
    Implied,
    Named,
    Json(Value),
}

/// Why a value cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an option that QEMU would understand: {reason}")]
pub struct OptionError {
    text: String,
    reason: String,
}

impl OptionValue {
    /// Reads `text`; a first part without `=` is the value of `implied`.
    pub fn parse(text: &str, implied: &str) -> Result<OptionValue, OptionError> {
        if text.trim_start().starts_with('{') {
            return OptionValue::parse_json(text);
        }
        let mut parts = Vec::new();
        let mut form = Form::Named;
        for (index, part) in split_commas(text).into_iter().enumerate() {
            match part.split_once('=') {
                Some((key, value)) => parts.push((key.to_owned(), value.to_owned())),
                None if index == 0 => {
                    form = Form::Implied;
                    parts.push((implied.to_owned(), part));
                }
                // `server,wait` for `server=on,wait=on`, and `nowait` for `wait=off`.
                None => parts.push((part, String::new())),
            }
        }
        Ok(OptionValue { form, parts })
    }

    fn parse_json(text: &str) -> Result<OptionValue, OptionError> {
        let fail = |reason: String| OptionError { text: text.to_owned(), reason };
        let json: Value = serde_json::from_str(text).map_err(|error| fail(error.to_string()))?;
        let mut parts = Vec::new();
        flatten("", &json, &mut parts);
        if !json.is_object() {
            return Err(fail("it is no JSON object".to_owned()));
        }
        Ok(OptionValue { form: Form::Json(json), parts })
    }

    /// The last value of `key`: a later one overrides an earlier one.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.parts.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Whether a switch is on: `key=on`, `key=yes`, `key=true`, or the bare key.
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.get(key), Some("on" | "yes" | "true" | "y" | ""))
    }

    /// All parts, in order.
    pub fn parts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.parts.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Sets `key`, in its place if it is there. A switch is set with `on` and `off`.
    pub fn set(&mut self, key: &str, value: &str) {
        if let Form::Json(Value::Object(members)) = &mut self.form {
            let json = match value {
                "on" => Value::Bool(true),
                "off" => Value::Bool(false),
                text => Value::String(text.to_owned()),
            };
            members.insert(key.to_owned(), json);
        }
        match self.parts.iter_mut().rev().find(|(name, _)| name == key) {
            Some((_, old)) => value.clone_into(old),
            None => self.parts.push((key.to_owned(), value.to_owned())),
        }
    }

    /// The option as QEMU reads it.
    pub fn to_text(&self) -> String {
        if let Form::Json(json) = &self.form {
            return json.to_string();
        }
        let part = |(index, (key, value)): (usize, &(String, String))| {
            let value = value.replace(',', ",,");
            match (index, &self.form) {
                (0, Form::Implied) => value,
                _ if value.is_empty() => key.clone(),
                _ => format!("{key}={value}"),
            }
        };
        self.parts.iter().enumerate().map(part).collect::<Vec<_>>().join(",")
    }
}

/// The parts between single commas, with doubled ones made single.
fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        let last = parts.last_mut().expect("there is always one");
        if character != ',' {
            last.push(character);
        } else if characters.next_if_eq(&',').is_some() {
            last.push(',');
        } else {
            parts.push(String::new());
        }
    }
    // A comma at the end is passed over, as QEMU does.
    if parts.len() > 1 && parts.last().is_some_and(String::is_empty) {
        parts.pop();
    }
    parts
}

fn flatten(prefix: &str, json: &Value, parts: &mut Vec<(String, String)>) {
    let name = |key: &str| match prefix {
        "" => key.to_owned(),
        prefix => format!("{prefix}.{key}"),
    };
    match json {
        Value::Object(members) => {
            for (key, member) in members {
                flatten(&name(key), member, parts);
            }
        }
        Value::Array(members) => {
            for (index, member) in members.iter().enumerate() {
                flatten(&name(&index.to_string()), member, parts);
            }
        }
        Value::Bool(on) => {
            parts.push((prefix.to_owned(), if *on { "on" } else { "off" }.to_owned()));
        }
        Value::String(text) => parts.push((prefix.to_owned(), text.clone())),
        Value::Number(number) => parts.push((prefix.to_owned(), number.to_string())),
        Value::Null => {}
    }
}

/// Reads a number of bytes as QEMU does; `unit` is what a number without a suffix counts.
pub fn parse_size(text: &str, unit: u64) -> Option<u64> {
    let text = text.trim();
    let (digits, unit) = match text.chars().last()?.to_ascii_uppercase() {
        'B' => (&text[..text.len() - 1], 1),
        'K' => (&text[..text.len() - 1], 1 << 10),
        'M' => (&text[..text.len() - 1], 1 << 20),
        'G' => (&text[..text.len() - 1], 1 << 30),
        'T' => (&text[..text.len() - 1], 1 << 40),
        'P' => (&text[..text.len() - 1], 1 << 50),
        _ => (text, unit),
    };
    let plain = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        // A suffix of a hexadecimal number would be one of its digits.
        return if unit == 1 { u64::from_str_radix(hex, 16).ok() } else { None };
    }
    if let Some((whole, fraction)) = digits.split_once('.') {
        if !plain(whole) || !plain(fraction) || fraction.is_empty() || whole.is_empty() {
            return None;
        }
        let bytes = digits.parse::<f64>().ok()? * unit as f64;
        return (bytes < u64::MAX as f64).then_some(bytes as u64);
    }
    if digits.is_empty() || !plain(digits) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> OptionValue {
        OptionValue::parse(text, "type").expect("read")
    }

    #[test]
    fn parts_are_told_apart_as_qemu_does() {
        let machine = parse("q35,accel=tcg,dump-guest-core");
        assert_eq!(machine.get("type"), Some("q35"));
        assert_eq!(machine.get("accel"), Some("tcg"));
        assert!(machine.is_on("dump-guest-core") && !machine.is_on("accel"));
        let file = parse("file=/a,,b,cache=none,cache=unsafe");
        assert_eq!(file.get("file"), Some("/a,b"));
        assert_eq!(file.get("cache"), Some("unsafe"), "the last one counts");
        assert_eq!(parse("a=b=c").get("a"), Some("b=c"));
    }

    #[test]
    fn what_is_set_stands_in_its_place() {
        let mut machine = parse("q35,accel=tcg");
        machine.set("accel", "kvm");
        machine.set("memory-backend", "x");
        assert_eq!(machine.to_text(), "q35,accel=kvm,memory-backend=x");
    }

    #[test]
    fn json_is_read_flat_and_written_as_json() {
        let text = r#"{"driver":"qcow2","cache":{"direct":true},"list":[1,"b"],"share":false}"#;
        let mut json = parse(text);
        assert!(json.is_on("cache.direct") && !json.is_on("share"));
        assert_eq!(json.get("list.1"), Some("b"));
        json.set("share", "on");
        let written: Value = serde_json::from_str(&json.to_text()).unwrap();
        assert_eq!(written["share"], Value::Bool(true));
        assert_eq!(written["cache"]["direct"], Value::Bool(true));
        assert!(OptionValue::parse("{\"driver\":", "type").is_err());
    }

    #[test]
    fn sizes_are_read_as_qemu_does() {
        let mib = |text| parse_size(text, 1 << 20);
        assert_eq!(mib("512"), Some(512 << 20));
        assert_eq!(mib("4G"), Some(4 << 30));
        assert_eq!(mib("1.5g"), Some(3 << 29));
        assert_eq!(parse_size("4096", 1), Some(4096));
        assert_eq!(parse_size("4096B", 1 << 20), Some(4096));
        assert_eq!(parse_size("0x1000", 1), Some(4096));
        for bad in ["", "G", "x", "1x", "-1", "1.", ".5", "99999999999999999999", "16777216T"] {
            assert_eq!(mib(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn an_unchanged_option_is_written_as_it_was(
            first in "[a-z0-9]{1,8}",
            rest in proptest::collection::vec(("[a-z][a-z.-]{0,6}", "[a-z0-9,/=]{1,9}"), 0..5),
        ) {
            let mut text = first;
            for (key, value) in rest {
                text += &format!(",{key}={}", value.replace(',', ",,"));
            }
            prop_assert_eq!(parse(&text).to_text(), text);
        }

        #[test]
        fn nothing_makes_it_panic(text in "\\PC{0,40}") {
            if let Ok(option) = OptionValue::parse(&text, "type") {
                // Written text reads as the same option again.
                let again = OptionValue::parse(&option.to_text(), "type").unwrap();
                let (_, _) = (again.to_text(), parse_size(&text, 1));
            }
        }
    }
}
