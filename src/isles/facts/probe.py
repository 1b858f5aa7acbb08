"""A text to compare two tokenizers. It has many cases that tokenizers split differently."""

PROBE = (
    "Okay 2024: 1234567 is 3.14 or 1,000\u00b2. We'll DON'T camelCase HTTPServer_v2 x+=1;  \t\tif "
    "(a&&b) {\r\n    return;\n}\n\n\n  \u2581 na\u00efve cafe\u0301 \ufb01 \uff21 "
    "\u4e2d\u6587\u3001\u65e5\u672c\u8a9e\u306e \ud55c\uad6d\uc5b4 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u0645\u0631\u062d\u0628\u0627 \U0001f600\u200d\U0001f525 \u2026 \u00a0end "
)
"""Digits, contractions, capitals, code, blanks and lines, letters with and without their accents,
ligatures, wide letters and seven scripts."""
