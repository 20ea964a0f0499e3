//! How vocabularies spell bytes: in GPT-2's way, which most byte-pair tokenizers share, or as SentencePiece does.

use std::collections::HashMap;

/// The byte that a token of SentencePiece stands for, such as `<0x0A>`.
pub fn byte_token(spelling: &str) -> Option<u8> {
    u8::from_str_radix(spelling.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
}

/// The character that stands for a byte in GPT-2's vocabularies: itself if it prints, else the next unused one from U+0100 on.
pub fn spelled(byte: u8) -> char {
    let prints = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match byte {
        byte if prints(byte) => byte.into(),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap_or_default(),
        0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte) - 0x7F).unwrap_or_default(),
        _ => '\u{143}',
    }
}

/// The bytes of a byte-pair token. llama.cpp writes a character that stands for no byte like this.
pub(crate) fn decoded(spelling: &str, bytes: &HashMap<char, u8>) -> Vec<u8> {
    let mut piece = Vec::with_capacity(spelling.len());
    for c in spelling.chars() {
        match bytes.get(&c) {
            Some(&byte) => piece.push(byte),
            None => {
                let hex: String = c.to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
                piece.extend(format!("[UNK_BYTE_0x{hex}{spelling}]").bytes());
            }
        }
    }
    piece
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::spelled;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let all: BTreeSet<char> = (0..=255).map(spelled).collect();
        assert_eq!(all.len(), 256);
        assert!(all.iter().all(|c| !c.is_whitespace() && !c.is_control()));
        // GPT-2's space and newline.
        assert_eq!((spelled(b' '), spelled(b'\n'), spelled(b'a')), ('Ġ', 'Ċ', 'a'));
    }
}
